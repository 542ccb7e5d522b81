package streams

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/parquet-go/parquet-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/table/delta"
)

// readers is the folder of a Node.js package with programs that read tables: see readers/.
var readers = flag.String("readers", "", "folder of readers/ with its packages installed: other programs read the tables, too")

// logDir reads the Delta log of a table in a mount.
type logDir string

func (d logDir) List(context.Context) (names []string, err error) {
	list, err := os.ReadDir(string(d))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
}

func (d logDir) ReadFile(_ context.Context, name string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(string(d), name))
	if os.IsNotExist(err) {
		err = meta.E("read", meta.NotFound, name, err)
	}
	return b, err
}

func (d logDir) Create(context.Context, string, []byte) error  { return os.ErrInvalid }
func (d logDir) Replace(context.Context, string, []byte) error { return os.ErrInvalid }
func (d logDir) Remove(context.Context, string) error          { return os.ErrInvalid }

// tableRow is a row of the test's table.
type tableRow struct {
	Partition int32   `parquet:"partition" json:"partition"`
	Offset    int64   `parquet:"offset" json:"offset"`
	N         *int64  `parquet:"n,optional" json:"n"`
	Name      *string `parquet:"name,optional" json:"name"`
}

func (r tableRow) String() string {
	if r.N == nil || r.Name == nil {
		return fmt.Sprintf("%d/%d null", r.Partition, r.Offset)
	}
	return fmt.Sprintf("%d/%d %d %s", r.Partition, r.Offset, *r.N, *r.Name)
}

// readTable reads a table by its Delta log, in the order of the records.
func readTable(dir string) (rows []string, files []string, err error) {
	t, err := delta.Open(context.Background(), logDir(filepath.Join(dir, "_delta_log")))
	if err != nil {
		return nil, nil, err
	}
	var all []tableRow
	for p := range t.State().Files {
		part, err := parquet.ReadFile[tableRow](filepath.Join(dir, p))
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", p, err)
		}
		all, files = append(all, part...), append(files, p)
	}
	return inOrder(all), files, nil
}

func inOrder(all []tableRow) (rows []string) {
	slices.SortFunc(all, func(a, b tableRow) int {
		return int(int64(a.Partition)<<40 + a.Offset - int64(b.Partition)<<40 - b.Offset)
	})
	for _, r := range all {
		rows = append(rows, r.String())
	}
	return rows
}

// agree fails unless a table in a mount has these rows, for this program and for those of
// -readers.
func agree(t *testing.T, dir string, want []string) {
	t.Helper()
	rows, files, err := readTable(dir)
	if err != nil || !slices.Equal(rows, want) {
		t.Fatalf("DATA: %s has %d rows, want %d (%v)\n%v\n%v", dir, len(rows), len(want), err, rows, want)
	}
	if *readers == "" {
		return
	}
	for _, reader := range []string{"chdb", "duckdb", "hyparquet"} {
		cmd := exec.CommandContext(t.Context(), "node", append([]string{filepath.Join(*readers, "read.mjs"), reader, dir}, files...)...)
		cmd.Dir = dir // chdb reads files below its working directory only
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s reads %s: %v", reader, dir, err)
		}
		var all []tableRow
		for line := range strings.Lines(string(out)) {
			var r tableRow
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("%s: %s: %v", reader, line, err)
			}
			all = append(all, r)
		}
		if rows := inOrder(all); !slices.Equal(rows, want) {
			t.Errorf("DATA: %s reads %d rows of %s, want %d\n%v\n%v", reader, len(rows), dir, len(want), rows, want)
		}
	}
}

// TestTable: the published table has each acknowledged record once, over kills of the gateway; in
// a snapshot and a clone the table has the state of the moment, and the table moves with its
// directory.
func TestTable(t *testing.T) {
	mnt := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	m := newMachine(t, "--mount", mnt)
	stop := func() {
		t.Helper()
		m.kill()
		if err := spawn.Unmount(mnt); err != nil {
			t.Fatal(err)
		}
	}
	defer stop()
	m.Must("volume", "create", "v", "--attach", "/v")
	m.Must("stream", "create", "/v/t", "--partitions", "2", "--format", "json", "--schema", "n:long,name:string", "--lag", "1s")
	var mu sync.Mutex
	acked := map[string]bool{}
	c := m.client(kgo.ProducerLinger(time.Millisecond), kgo.RetryBackoffFn(func(int) time.Duration { return 50 * time.Millisecond }), kgo.ProducerBatchCompression(kgo.ZstdCompression()))
	n := 0
	produce := func(topic string, count int) {
		t.Helper()
		for range count {
			n++
			n, partition := n, int32(n%2)
			c.Produce(context.Background(), &kgo.Record{Topic: topic, Partition: partition, Value: fmt.Appendf(nil, `{"n":%d,"name":"é %d"}`, n, n)}, func(r *kgo.Record, err error) {
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				}
				acked[fmt.Sprintf("%d/%d %d é %d", r.Partition, r.Offset, n, n)] = true
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := c.Flush(ctx); err != nil {
			t.Fatal(err)
		}
	}
	// published waits until the table has all records, and returns its rows.
	published := func(dir string) (rows []string) {
		t.Helper()
		m.Until("the table has the records", func() (err error) {
			if rows, _, err = readTable(dir); err == nil && len(rows) < n {
				err = fmt.Errorf("%d rows of %d", len(rows), n)
			}
			return err
		})
		for _, r := range rows {
			if !acked[r] {
				t.Fatalf("DATA: the table has %s, which was not produced", r)
			}
		}
		if len(rows) != n {
			t.Fatalf("DATA: the table has %d rows of %d records", len(rows), n)
		}
		return rows
	}
	for round := range 2 {
		produce("v.t", 100)
		m.Until("a publication began", func() error {
			list, err := filepath.Glob(filepath.Join(mnt, "v/t/data/p=*/*"))
			if err == nil && len(list) <= round {
				err = fmt.Errorf("files %v", list)
			}
			return err
		})
		stop()
		m.start()
	}
	produce("v.t", 2)
	m.Until("the mount serves", func() error { _, err := os.Stat(filepath.Join(mnt, "v")); return err })
	before := published(filepath.Join(mnt, "v/t"))
	for _, name := range []string{"data/p=0/other.parquet", "_delta_log/other.json", "rejected/other"} {
		if err := os.WriteFile(filepath.Join(mnt, "v/t", name), nil, 0o644); !errors.Is(err, syscall.EPERM) {
			t.Errorf("a mount makes %s: %v", name, err)
		}
	}
	m.Must("snapshot", "create", "v", "s1")
	m.Must("clone", "create", "v@s1", "c", "--attach", "/c")
	produce("v.t", 50)
	agree(t, filepath.Join(mnt, "v/t"), published(filepath.Join(mnt, "v/t")))
	agree(t, filepath.Join(mnt, "v/.snapshot/s1/t"), before)
	agree(t, filepath.Join(mnt, "c/t"), before)
	if err := os.Rename(filepath.Join(mnt, "v/t"), filepath.Join(mnt, "v/moved")); err != nil {
		t.Fatal(err)
	}
	produce("v.moved", 10)
	agree(t, filepath.Join(mnt, "v/moved"), published(filepath.Join(mnt, "v/moved")))
	// Values that do not fit are beside the table, with the reason.
	m.kcat("no JSON\n", "-P", "-t", "v.moved", "-p", "0")
	m.Until("the value is rejected", func() error {
		list, err := filepath.Glob(filepath.Join(mnt, "v/moved/rejected/p=0/*.jsonl"))
		if err == nil && len(list) != 1 {
			return fmt.Errorf("files %v", list)
		}
		b, err := os.ReadFile(list[0])
		if err == nil && !strings.Contains(string(b), "no JSON object") {
			err = fmt.Errorf("the file has %s", b)
		}
		return err
	})
	m.Must("stream", "delete", "/v/moved", "--yes")
	if _, err := os.Stat(filepath.Join(mnt, "v/moved")); !os.IsNotExist(err) {
		t.Errorf("the directory of the deleted stream: %v", err)
	}
}
