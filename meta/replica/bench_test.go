package replica

import "testing"

// BenchmarkAppend measures the store's cost for asking the machine, beside tens of microseconds
// of an append.
func BenchmarkAppend(b *testing.B) {
	var off uint64
	for b.Loop() {
		r := Replica{State: Open, Fence: w1, Length: off}
		if do, err := r.Append(w1, off, 4096); err != nil || do != Write {
			b.Fatal(do, err)
		}
		r.Appended(w1, 4096)
		off = r.Length
	}
}
