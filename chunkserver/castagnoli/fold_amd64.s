#include "textflag.h"

// FOLD multiplies the 16-byte lanes of acc by the constants and adds what follows.
#define FOLD(next, k, acc, tmp) \
	VPCLMULQDQ $0x00, k, acc, tmp \
	VPCLMULQDQ $0x11, k, acc, acc \
	VPTERNLOGQ $0x96, next, tmp, acc

// func fold(p *byte, n int, state uint32, k *[4]uint64, rest *[64]byte)
TEXT ·fold(SB), NOSPLIT, $0-40
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVL state+16(FP), AX
	MOVQ k+24(FP), DX
	MOVQ rest+32(FP), DI

	VBROADCASTI32X4 (DX), Z8
	VBROADCASTI32X4 16(DX), Z9
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVD AX, X4
	VPXORQ Z4, Z0, Z0

loop:
	ADDQ $256, SI
	SUBQ $256, CX
	JZ   join
	FOLD(0(SI), Z8, Z0, Z4)
	FOLD(64(SI), Z8, Z1, Z5)
	FOLD(128(SI), Z8, Z2, Z6)
	FOLD(192(SI), Z8, Z3, Z7)
	JMP  loop

join:
	FOLD(Z1, Z9, Z0, Z4)
	FOLD(Z2, Z9, Z0, Z4)
	FOLD(Z3, Z9, Z0, Z4)
	VMOVDQU64 Z0, (DI)
	VZEROUPPER
	RET
