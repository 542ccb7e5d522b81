package quota

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/test/program"
)

// metric reads a value of the metadata server's metrics; "" if the server has none.
func (r *rig) metric(name string) string {
	r.T.Helper()
	all, err := program.Metrics(filepath.Join(r.metaDir(), "admin.sock"))
	if err != nil {
		r.T.Fatal(err)
	}
	if v, ok := all[name]; ok {
		return fmt.Sprint(v)
	}
	return ""
}

// TestAdvisory: an advisory quota refuses nothing. When the use crosses the quota, the volume's
// row, the log and the metrics tell this once. The state stays across a restart of the owner
// and a use that falls a little, and ends when the use is well below the quota.
func TestAdvisory(t *testing.T) {
	const limit = 8 << 20
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--advisory-quota", fmt.Sprint(limit), "--advisory-quota-inodes", "8")
	r.volume("set", "q", "--events", "on")
	at, _ := r.mount("a")
	write := func(name string, n int) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(at, name), os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	type over struct {
		Bytes  string `json:"bytes_over"`
		Inodes string `json:"inodes_over"`
	}
	shown := func(what string, bytes, inodes bool) (o over) {
		t.Helper()
		r.Until(what, func() error {
			o = over{}
			out, err := r.Ctl("volume", "show", "q", "--output", "json")
			if err != nil {
				return err
			}
			if err := json.Unmarshal(out, &o); err != nil {
				return err
			}
			if (o.Bytes != "") != bytes || (o.Inodes != "") != inodes {
				return fmt.Errorf("it shows %+v", o)
			}
			return nil
		})
		want := map[bool]string{false: "0", true: "1"}
		for of, is := range map[string]bool{"bytes": bytes, "inodes": inodes} {
			name := fmt.Sprintf(`penstock_meta_volume_advisory_exceeded{of=%q,volume="q"}`, of)
			r.Until(what, func() error {
				if got := r.metric(name); got != want[is] {
					return fmt.Errorf("%s is %q, not %s", name, got, want[is])
				}
				return nil
			})
		}
		return o
	}
	logged := func(line string) int {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(r.Dir, "log"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), line)
	}
	const above, below = "the volume is above its advisory quota", "the volume is below its advisory quota again"

	write("a", limit-1<<20)
	shown("below", false, false)
	write("b", 2<<20) // nothing is refused
	first := shown("above", true, false)
	if n := logged(above); n != 1 {
		t.Errorf("crossing it is logged %d times", n)
	}
	for i := range 4 { // about the limit, and no further news
		write("b", 2<<20+i)
		if err := os.Truncate(filepath.Join(at, "b"), 1<<20-100<<10); err != nil {
			t.Fatal(err)
		}
	}
	write("b", 2<<20)
	r.meta.Kill()
	r.startMeta()
	write("c", 10)
	if o := shown("the owner restarted", true, false); o != first {
		t.Errorf("%+v, was %+v", o, first)
	}
	for i := range 9 {
		write(fmt.Sprint("n", i), 10)
	}
	shown("many files", true, true)
	if n := logged(above); n != 2 {
		t.Errorf("the two crossings are logged %d times", n)
	}
	if err := os.Truncate(filepath.Join(at, "a"), 1<<20); err != nil {
		t.Fatal(err)
	}
	shown("well below", false, true)
	if n := logged(below); n != 1 {
		t.Errorf("that it is below is logged %d times", n)
	}
	r.volume("set", "q", "--advisory-quota-inodes", "0", "--advisory-quota", "1M")
	r.Until("changed", func() error {
		if got := r.metric(`penstock_meta_volume_advisory_exceeded{of="inodes",volume="q"}`); got != "" {
			return fmt.Errorf("there is no such quota any more, and it shows %q", got)
		}
		return nil
	})
	// Each crossing once, over the death of the owner, too; the last two come at once.
	want := []string{"bytes true 8388608", "inodes true 8", "bytes false 8388608", "bytes true 1048576", "inodes false 0"}
	r.Until("events", func() error {
		out, err := r.Ctl("events", "q", "--json")
		if err != nil {
			return err
		}
		var got []string
		for line := range strings.Lines(string(out)) {
			var e struct {
				Kind  string `json:"kind"`
				Quota struct {
					Of    string `json:"of"`
					Over  bool   `json:"over"`
					Used  uint64 `json:"used"`
					Limit uint64 `json:"limit"`
				} `json:"quota"`
			}
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				return err
			}
			if q := e.Quota; e.Kind == "quota" {
				got = append(got, fmt.Sprint(q.Of, " ", q.Over, " ", q.Limit))
				if q.Over && q.Used <= q.Limit || q.Used == 0 {
					return fmt.Errorf("%+v", q)
				}
			}
		}
		if slices.Sort(got[min(3, len(got)):]); !slices.Equal(got, want) {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	r.fsck()
}
