package placement

import "testing"

// FuzzParseAddress: a parsed address is written as the same text again.
func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"1@h:1", "2@[::1]:9092", "@h:1", "1@h", "-1@h:1", "1@:9", "1@h:0", "99999999999@h:1", "1@h:70000", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		g, ok := ParseAddress(s)
		if !ok {
			return
		}
		if again, ok := ParseAddress(g.Address()); !ok || again != g {
			t.Fatalf("%q is %+v, and as %q it is %+v, %v", s, g, g.Address(), again, ok)
		}
		if host, port, ok := g.KafkaAt(); !ok || host == "" || port < 1 || port > 65535 || g.Number < 0 {
			t.Fatalf("%q is %+v", s, g)
		}
	})
}
