//go:build race

package cluster

// With the race detector, the built penstock has it, too.
func init() { race = true }
