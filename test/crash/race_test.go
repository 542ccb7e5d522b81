//go:build race

package crash

// With the race detector, the built penstock has it, too: a race ends it with
// exit status 66 at the next stop.
func init() { buildFlags, buildEnv = []string{"-race"}, "CGO_ENABLED=1" }
