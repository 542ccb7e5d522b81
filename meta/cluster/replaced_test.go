package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestReplacedIsNoticed: a process notices an emptied, restored, exchanged or reset etcd, and
// reports the difference; an unchanged cluster gives none of these reports.
func TestReplacedIsNoticed(t *testing.T) {
	t.Parallel()
	cli := client(t)
	told := make(chan error, 1)
	c, err := Open(t.Context(), cli, Config{Replaced: func(err error) { told <- err }})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	key := c.prefix + "/format"
	rev, err := c.sameFormat(t.Context(), 0)
	if err != nil || rev == 0 {
		t.Fatal(rev, err)
	}
	for range 3 {
		if _, err := cli.Put(t.Context(), c.prefix+"/x", "y"); err != nil {
			t.Fatal(err)
		}
		if rev, err = c.sameFormat(t.Context(), rev); err != nil {
			t.Fatal(err)
		}
	}
	for what, at := range map[string]struct {
		format Format
		last   int64
	}{
		"holds cluster other":    {Format{Version: 1, Format: 1, ID: "other"}, 0},
		"was restored meanwhile": {Format{Version: 1, Format: 1, ID: c.ID(), Restored: 5}, 0},
		"was set back from":      {c.format, rev + 1000},
	} {
		if _, err := cli.Put(t.Context(), key, encode(at.format)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.sameFormat(t.Context(), at.last); !errors.Is(err, meta.Invalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := cli.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-told:
		if !strings.Contains(err.Error(), "is empty now") || !strings.Contains(err.Error(), "cluster restore") {
			t.Error(err)
		}
	case <-time.After(90 * time.Second):
		t.Error("an emptied etcd is not noticed")
	}
}
