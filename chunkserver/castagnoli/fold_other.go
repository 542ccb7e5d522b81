//go:build !amd64

package castagnoli

const folds = false

func fold(p *byte, n int, state uint32, k *[4]uint64, rest *[64]byte) { panic("no such instructions") }
