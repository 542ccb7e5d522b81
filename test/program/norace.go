//go:build !race

package program

const race = false
