package castagnoli

import "golang.org/x/sys/cpu"

var folds = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ

// fold gives 64 bytes whose checksum, from the state 0, is that of n bytes at p
// from the state. n is a multiple of foldStep and not zero.
//
//go:noescape
func fold(p *byte, n int, state uint32, k *[4]uint64, rest *[64]byte)
