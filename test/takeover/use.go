package takeover

import "io"

// Use is a process that uses a mount, for tests of other ways to serve one: it does
// all that this package knows in dir until in ends, and tells out "begun", and what
// it did. Any error that it sees and any byte that it does not expect is its error.
func Use(dir string, in io.Reader, out io.Writer) error { return run(dir, allKinds, in, out) }

var allKinds = []string{"append", "blocks", "tree", "mapped", "locks", "list", "unlinked", "stream", "tails"}
