package namespace

import (
	"fmt"
	"unicode/utf8"
)

// Problem is one inconsistency.
type Problem struct {
	Key  []byte // the wrong record, or the record that lacks another
	Text string // the inconsistency, with the numbers
}

func (c *checker) bad(key []byte, format string, args ...any) {
	c.rep.Count++
	if len(c.rep.Problems) < maxProblems {
		c.rep.Problems = append(c.rep.Problems, Problem{append([]byte(nil), key...), fmt.Sprintf(format, args...)})
	}
}

func printable(s string) string {
	if utf8.ValidString(s) {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("%x", s)
}

func (p Problem) String() string { return fmt.Sprintf("%x: %s", p.Key, p.Text) }

// maxProblems bounds a report; the count goes on.
const maxProblems = 1000

// Report is the outcome of Check.
type Report struct {
	Inodes, Dirs, Entries, Extents, Xattrs uint64
	Chunks, Orphans, Sessions, Replies     uint64
	Bytes                                  uint64 // sum of Blocks
	Problems                               []Problem
	Count                                  uint64 // of problems, including problems that Problems omits
	Junctions                              []JunctionAt
	Lost                                   uint64 // bytes of extents, of any generation, whose loss was accepted
}
