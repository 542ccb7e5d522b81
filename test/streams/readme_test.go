package streams

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// blocks returns the indented blocks of commands below a heading of a page.
func blocks(t *testing.T, page, heading string) (all []string) {
	t.Helper()
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(b), "\n"+heading+"\n")
	if !found {
		t.Fatalf("%s has no heading %q", page, heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	for part := range strings.SplitSeq(text, "\n\n") {
		if strings.HasPrefix(part, "    ") {
			all = append(all, strings.ReplaceAll(part[4:], "\n    ", "\n"))
		}
	}
	return all
}

// TestREADME runs the commands of README.md's section "Use it" behind `penstock up`, as written:
// with the resulting tree, a Kafka client's 1000 records can be consumed, lie in a file of the
// stream, and are in the Delta table.
func TestREADME(t *testing.T) {
	all := blocks(t, "../../README.md", "## Use it")
	if len(all) != 4 || !strings.Contains(all[0], "penstock up") || !strings.HasPrefix(all[3], "SELECT count()") {
		t.Fatalf("the blocks are not: up, files, streams, a query: %q", all)
	}
	mnt := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	m := newMachine(t, "--mount", mnt)
	defer func() {
		m.kill()
		if err := spawn.Unmount(mnt); err != nil {
			t.Error(err)
		}
	}()
	m.Until("the mount serves", func() error { _, err := os.Stat(filepath.Join(mnt, ".penstock")); return err })
	run := func(block string) string {
		t.Helper()
		block = strings.NewReplacer("bin/penstock", program.Path, "/mnt/penstock", mnt, "127.0.0.1:9092", m.kafka).Replace(block)
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", block)
		cmd.Dir, cmd.Env = "../..", append(os.Environ(), "PENSTOCK_CLUSTER="+m.Addr)
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s\n%v: %s%s", block, err, out, errs.String())
		}
		return string(out)
	}
	if out := run(all[1]); !strings.Contains(out, "docs\n") {
		t.Errorf("DATA: the snapshot does not have docs: %s", out)
	}
	out := run(all[2])
	if !strings.Contains(out, lines(1000)) || !strings.Contains(out, "00000000000000000000.seg\n") {
		t.Errorf("DATA: the stream's commands print %s", out)
	}
	table := filepath.Join(mnt, "v/clicks")
	if !strings.Contains(all[3], "'/mnt/penstock/v/clicks'") {
		t.Errorf("the query is not about the stream's directory: %s", all[3])
	}
	var rows []string
	m.Until("the table has the records", func() (err error) {
		if rows, _, err = readTable(table); err == nil && len(rows) < 1000 {
			err = fmt.Errorf("%d rows", len(rows))
		}
		return err
	})
	if len(slices.Compact(rows)) != 1000 {
		t.Errorf("DATA: the table has %d rows", len(rows))
	}
}
