package takeover

import "io"

// Use is a process that uses a mount, for tests of other ways to serve a mount: the process does
// all kinds of work in dir until in ends, and writes "begun" and the counts to out. Any error and
// any unexpected byte is the returned error.
func Use(dir string, in io.Reader, out io.Writer) error { return run(dir, allKinds, in, out) }

var allKinds = []string{"append", "blocks", "tree", "mapped", "locks", "list", "unlinked", "stream", "tails"}
