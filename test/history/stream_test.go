package history

import (
	"strings"
	"testing"
)

// TestStreamRules plants one violation of each rule in an otherwise right history. The check must
// find the violation, and nothing in the history without the violation.
func TestStreamRules(t *testing.T) {
	p := Partition{"t", 0}
	a, b := func(n int64) Record { return Record{"a", n} }, func(n int64) Record { return Record{"b", n} }
	// story is the history that is right: a sends once, b may repeat, b 1 is never acknowledged
	// and twice in the log.
	log := []Record{a(0), b(0), a(1), b(1), b(1)}
	story := func(s *Stream) {
		for n := range int64(2) {
			s.Send(a(n), p, Once)
			s.Send(b(n), p, Ordered)
		}
		s.Acknowledged(a(0), 0)
		s.Acknowledged(b(0), 1)
		s.SawEnd(p, s.AskEnd(p), 0, 2)
		s.Assign("c", p, 0)
		s.Read("c", p, 0, a(0))
		s.Read("c", p, 1, b(0))
		s.SawCommitted("g", p, s.AskCommitted("g", p), -1)
		s.Join("g", "m", p)
		s.Read("m", p, 0, a(0))
		s.Read("m", p, 1, b(0))
		s.Commit("g", p, 1)
		s.Committed("g", p, 1)
		s.Commit("g", p, 2)
		s.SawCommitted("g", p, s.AskCommitted("g", p), 1)
		s.SawCommitted("g", p, s.AskCommitted("g", p), 2)
		s.Acknowledged(a(1), -1)
		s.Snapshot("s", p, s.AskEnd(p), log[:3])
		s.Leave("m", p)
		s.Join("g", "n", p)
		for i := 2; i < len(log); i++ {
			s.Read("c", p, int64(i), log[i])
			s.Read("n", p, int64(i), log[i])
		}
		s.Commit("g", p, 5)
		s.Committed("g", p, 5)
	}
	end := func(s *Stream) error { return s.Final(map[Partition]int64{p: 5}, []string{"c", "n"}) }
	s := NewStream()
	story(s)
	if err := end(s); err != nil {
		t.Fatalf("a history that is right: %v", err)
	}
	if n := s.Acknowledgements(); n != 3 {
		t.Errorf("%d records were acknowledged", n)
	}
	for _, v := range []struct {
		rule  string
		plant func(s *Stream)
	}{
		{"has record {b 1}, and had record {a 0}", func(s *Stream) { s.Assign("d", p, 0); s.Read("d", p, 0, b(1)) }},
		{"has record {a 0}, and had record {b 0}", func(s *Stream) { s.Acknowledged(a(0), 1) }},
		{"which nobody sent there", func(s *Stream) { s.Assign("d", p, 5); s.Read("d", p, 5, a(9)) }},
		{"which nobody sent there", func(s *Stream) { s.Assign("d", Partition{"t", 1}, 0); s.Read("d", Partition{"t", 1}, 0, a(0)) }},
		{"and was to be there once", func(s *Stream) { s.Read("c", p, 5, a(1)) }},
		{"does not have the record", func(s *Stream) { s.Send(a(2), p, Once); s.Acknowledged(a(2), -1) }},
		{"no consumer read offset 5", func(s *Stream) { s.SawEnd(p, s.AskEnd(p), 0, 6) }},
		{"skipped the offsets 1 to 1", func(s *Stream) { s.Assign("d", p, 0); s.Read("d", p, 0, a(0)); s.Read("d", p, 2, a(1)) }},
		{"skipped the offsets 0 to 0", func(s *Stream) { s.Assign("d", p, 0); s.Read("d", p, 1, b(0)) }},
		{"went back from offset 1 to 0", func(s *Stream) { s.Assign("d", p, 0); s.Read("d", p, 0, a(0)); s.Read("d", p, 0, a(0)) }},
		{"begins at offset 2 of t/0, and the group had committed 5", func(s *Stream) {
			s.Commit("g", p, 2)
			s.Committed("g", p, 2)
			s.Join("g", "o", p)
			s.Read("o", p, 2, a(1))
		}},
		{"no member has read offset 0", func(s *Stream) { s.Join("h", "o", p); s.Read("o", p, 1, b(0)) }},
		{"which the consumer does not read", func(s *Stream) { s.Leave("n", p); s.Read("n", p, 4, b(1)) }},
		{"went back from 5 to 2", func(s *Stream) { // a commit without an answer takes effect late
			s.Commit("g", p, 2)
			s.SawCommitted("g", p, s.AskCommitted("g", p), 2)
		}},
		{"went back from 5 to 1", func(s *Stream) { s.SawCommitted("g", p, s.AskCommitted("g", p), 1) }},
		{"has committed nothing in t/0, and had committed 5", func(s *Stream) { s.SawCommitted("g", p, s.AskCommitted("g", p), -1) }},
		{"which no member sent", func(s *Stream) { s.SawCommitted("g", p, s.AskCommitted("g", p), 0) }},
		{"the end of t/0 went back from 5 to 4", func(s *Stream) { s.SawEnd(p, s.AskEnd(p), 0, 4) }},
		{"begins at offset 1, and nothing was removed", func(s *Stream) { s.SawEnd(p, s.AskEnd(p), 1, 5) }},
		{"snapshot x has 4 records of t/0, and 5 were there before", func(s *Stream) { s.Snapshot("x", p, s.AskEnd(p), log[:4]) }},
		{"snapshot x: offset 1 of t/0 has record {a 1}, and had record {b 0}", func(s *Stream) { s.Snapshot("x", p, 2, []Record{a(0), a(1)}) }},
		{"snapshot x: offset 0 of t/0 has record {a 7}, which nobody sent there", func(s *Stream) { s.Snapshot("x", p, 0, []Record{a(7)}) }},
		{"consumer d stands at offset 0", func(s *Stream) { s.Assign("d", p, 0) }},
		{"ends at offset 5, and had offset 5", func(s *Stream) { s.Send(a(2), p, Once); s.Acknowledged(a(2), 5) }},
		{"group h was given the offsets before 1", func(s *Stream) { s.Join("h", "o", p); s.Read("o", p, 0, a(0)) }},
	} {
		s := NewStream()
		story(s)
		v.plant(s)
		last := int64(5)
		if strings.HasPrefix(v.rule, "no consumer read offset 5") {
			last = 6
		}
		ended := s.Final(map[Partition]int64{p: last}, []string{"c", "n", "d"})
		if ended == nil || !strings.Contains(ended.Error(), v.rule) {
			t.Errorf("planted: %s\nfound: %v", v.rule, ended)
		}
	}
}

// TestStreamOrder: a producer's number behind a later number is found, a repetition is right.
func TestStreamOrder(t *testing.T) {
	p := Partition{"t", 0}
	for _, x := range []struct {
		promise Promise
		right   bool
		order   []int64
	}{{Once, true, []int64{0, 1, 2}}, {Ordered, true, []int64{0, 1, 0, 1, 2}}, {Ordered, false, []int64{0, 2, 1}}, {Once, false, []int64{1, 0}}, {Any, true, []int64{1, 0, 2, 1}}} {
		s := NewStream()
		for n := range int64(3) {
			s.Send(Record{"a", n}, p, x.promise)
		}
		s.Assign("c", p, 0)
		for i, n := range x.order {
			s.Read("c", p, int64(i), Record{"a", n})
		}
		if err := s.Final(map[Partition]int64{p: int64(len(x.order))}, []string{"c"}); (err == nil) != x.right {
			t.Errorf("%v: %v", x.order, err)
		}
	}
}

// TestValues: damage to a value is seen.
func TestValues(t *testing.T) {
	r := Record{"kgo-1", 12345}
	for _, size := range []int{0, 20, 21, 22, 23, 500} {
		v := r.Value(size)
		if got, err := ParseRecord(v); err != nil || got != r {
			t.Errorf("%q: %v, %v", v, got, err)
		}
		for i := range v {
			bad := v[:i] + "y" + v[i+1:]
			if _, err := ParseRecord(bad); err == nil {
				t.Errorf("%q is taken for %q", bad, v)
			}
		}
		if _, err := ParseRecord(v[:len(v)-1]); err == nil {
			t.Errorf("%q is taken for %q", v[:len(v)-1], v)
		}
	}
}
