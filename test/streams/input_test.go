package streams

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/port"
)

// inputs has two mounts with holders. The processes of the first mount append through a gateway that
// they are given, those of the second mount through gateways that they find.
type inputs struct {
	*doors
	second *doors
	ingest string
	gate   *spawn.Process
}

func newInputs(t *testing.T) *inputs {
	t.Helper()
	at, err := port.Find()
	if err != nil {
		t.Fatal(err)
	}
	n := &inputs{ingest: at}
	n.doors = newDoors(t, "--gateway", at)
	n.second = n.doors.another("second")
	n.gateway()
	n.Until("the gateway is on the list", func() error {
		list, err := n.registered()
		if err == nil && len(list) == 0 {
			err = errors.New("no gateway runs")
		}
		return err
	})
	return n
}

// gateway starts the gateway of the mounts.
func (n *inputs) gateway() {
	n.T.Helper()
	kafka, err := port.Find()
	if err != nil {
		n.T.Fatal(err)
	}
	n.gate = n.Run("gateway", "--cluster", n.Addr, "--name", "lines", "--kafka", kafka, "--ingest", n.ingest, "--admin", "none", "--stream-idle", "2s")
}

// restart kills the gateway, and starts another one at the same address.
func (n *inputs) restart() {
	n.gate.Kill()
	<-n.gate.Done()
	n.gateway()
}

// appender appends objects to an in.jsonl, one a line, until its standard input ends. It prints how many
// were acknowledged: fsync, or close, succeeded afterwards. WRITEs end in the middle of lines.
const appender = `
import os, select, sys
path, name = sys.argv[1:]
n = 0
def line():
    global n
    n += 1
    return '{"by":"%s","n":%d}' % (name, n - 1)
while not select.select([sys.stdin], [], [], 0)[0]:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for _ in range(5):
        text = "".join(line() + "\n" for _ in range(40)).encode()
        half = len(text) // 2 + n % 7
        for part in text[:half], text[half:]:
            assert os.write(fd, part) == len(part)
        os.fsync(fd)
        print(n, flush=True)
    os.write(fd, line().encode()) # close ends the line
    os.close(fd)
    print(n, flush=True)
print("end", flush=True)
`

// writer is a process that appends.
type writer struct {
	cmd  *exec.Cmd
	stop io.Closer
	out  bytes.Buffer
}

// write starts an appender.
func write(t *testing.T, path, name string) *writer {
	t.Helper()
	w := &writer{cmd: exec.CommandContext(t.Context(), "python3", "-c", appender, path, name)}
	w.cmd.Stdout, w.cmd.Stderr = &w.out, os.Stderr
	in, err := w.cmd.StdinPipe()
	if err == nil {
		w.stop, err = in, w.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// end ends an appender, and returns how many lines were acknowledged.
func (w *writer) end(t *testing.T) (acked int) {
	t.Helper()
	if err := errors.Join(w.stop.Close(), w.cmd.Wait()); err != nil {
		t.Error(err)
	}
	l := strings.Fields(w.out.String())
	if len(l) < 2 || l[len(l)-1] != "end" {
		t.Fatalf("an appender printed %q", w.out.String())
	}
	acked, err := strconv.Atoi(l[len(l)-2])
	if err != nil {
		t.Fatal(err)
	}
	return acked
}

// values returns the values of all records of a topic, in the order of each partition.
func (m *machine) values(topic string, partitions int) (all []string) {
	m.T.Helper()
	for p := range partitions {
		for text := range strings.Lines(m.kcat("", "-C", "-t", topic, "-p", strconv.Itoa(p), "-o", "beginning", "-e")) {
			all = append(all, strings.TrimSuffix(text, "\n"))
		}
	}
	return all
}

// TestInput: lines that programs write to in.jsonl are records, also when the process that serves
// the mount, or the gateway, is replaced or killed meanwhile: each acknowledged line is in the
// stream once.
func TestInput(t *testing.T) {
	n := newInputs(t)
	n.Must("stream", "create", "/v/in", "--partitions", "3", "--format", "json")
	writers := map[string]*writer{}
	for i := range 8 {
		at := n.at
		if i%2 == 1 {
			at = n.second.at
		}
		name := fmt.Sprint("w", i)
		writers[name] = write(t, filepath.Join(at, "v/in/in.jsonl"), name)
	}
	for _, disturb := range []func(){n.replace, n.again, n.restart, n.second.again, n.again, n.replace} {
		time.Sleep(300 * time.Millisecond)
		disturb()
	}
	acked := map[string]int{}
	for name, w := range writers {
		acked[name] = w.end(t)
	}
	seen := map[string]int{}
	for _, text := range n.values("v.in", 3) {
		var v struct {
			By string
			N  int
		}
		if err := json.Unmarshal([]byte(text), &v); err != nil || v.By == "" {
			t.Fatalf("DATA: the stream has the record %q, %v", text, err)
		}
		if seen[text]++; seen[text] > 1 {
			t.Errorf("DATA: record %s is there twice", text)
		}
	}
	for name, count := range acked {
		for i := range count {
			if text := fmt.Sprintf("{\"by\":%q,\"n\":%d}", name, i); seen[text] != 1 {
				t.Errorf("DATA: record %s is there %d times", text, seen[text])
			}
		}
	}
	t.Logf("%d records; acknowledged: %v", len(seen), acked)
}

// TestInputWaits: fsync and close of in.jsonl return after the gateway has acknowledged the lines, and
// not before, however long the gateway takes.
func TestInputWaits(t *testing.T) {
	n := newInputs(t)
	n.Must("stream", "create", "/v/in")
	stored := func(text string) bool {
		b, err := os.ReadFile(filepath.Join(n.second.at, "v/in/log/0/00000000000000000000.seg"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		return bytes.Contains(b, []byte(text))
	}
	for _, c := range []struct {
		name string
		call func(*os.File) error
	}{
		{"fsync", func(f *os.File) error { return f.Sync() }},
		{"close", func(f *os.File) error { return f.Close() }},
		{"write with O_DSYNC", func(f *os.File) error { _, err := f.WriteString("and this\n"); return err }},
	} {
		flags := os.O_WRONLY | os.O_APPEND
		if strings.HasPrefix(c.name, "write") {
			flags |= unix.O_DSYNC
		}
		f, err := os.OpenFile(filepath.Join(n.at, "v/in/in.jsonl"), flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		line := "line before " + c.name
		if flags&unix.O_DSYNC != 0 {
			line = "and this"
		}
		if err := n.gate.Pause(); err != nil {
			t.Fatal(err)
		}
		returned := make(chan error, 1)
		go func() {
			var err error
			if flags&unix.O_DSYNC == 0 {
				_, err = f.WriteString(line + "\n")
			}
			returned <- errors.Join(err, c.call(f))
		}()
		select {
		case err := <-returned:
			t.Errorf("DATA: %s returned while the gateway stood still: %v", c.name, err)
			returned <- err
		case <-time.After(2 * time.Second):
		}
		if err := n.gate.Resume(); err != nil {
			t.Fatal(err)
		}
		if err := <-returned; err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if !stored(line) {
			t.Errorf("DATA: %s has returned, and the log does not have the line", c.name)
		}
		if c.name != "close" {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestInputPrograms: which programs and opens in.jsonl takes.
func TestInputPrograms(t *testing.T) {
	n := newInputs(t)
	n.Must("stream", "create", "/v/in", "--format", "json")
	dir := filepath.Join(n.at, "v/in")
	in := filepath.Join(dir, "in.jsonl")
	run := func(script string) (out string, err error) {
		cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
		cmd.Env = append(os.Environ(), "IN="+in)
		b, err := cmd.CombinedOutput()
		return string(b), err
	}
	if list, err := os.ReadDir(dir); err != nil || slices.ContainsFunc(list, func(e os.DirEntry) bool { return e.Name() == "in.jsonl" }) {
		t.Errorf("the directory lists %v, %v", list, err)
	}
	if info, err := os.Stat(in); err != nil || info.Mode() != 0o200 {
		t.Errorf("in.jsonl: %v, %v", info, err)
	}
	var want []string
	for _, c := range []struct {
		script string
		lines  []string
	}{
		{`echo 1 >> $IN; printf '{"a":2}' >> $IN; printf '\n\n3\r\n' >> $IN`, []string{"1", `{"a":2}`, "3"}},
		{`seq 4 6 | tee -a $IN > /dev/null`, []string{"4", "5", "6"}},
		{`{ /usr/bin/printf '{"a":'; /usr/bin/printf 7 | cat; /usr/bin/printf '}'; } >> $IN`, []string{`{"a":7}`}},
		{`python3 -c 'with open("'$IN'", "a") as f: print(8, file=f); f.write("9")'`, []string{"8", "9"}},
		{`exec 3>>$IN; for i in 10 11; do echo $i >&3; done; truncate -s 0 $IN; sync $IN 2>/dev/null; echo 12 >> $IN`, []string{"10", "11", "12"}},
	} {
		if out, err := run(c.script); err != nil {
			t.Errorf("%s: %v: %s", c.script, err, out)
		}
		want = append(want, c.lines...)
	}
	for script, errno := range map[string]string{
		`cat $IN`:              "Permission denied",
		`echo x > $IN`:         "Operation not permitted",
		`: 1<> $IN`:            "Permission denied",
		`chmod 777 $IN`:        "Operation not permitted",
		`rm $IN`:               "Operation not permitted",
		`ln $IN ` + dir + `/x`: "Operation not permitted",
	} {
		if out, err := run(script); err == nil || !strings.Contains(out, errno) {
			t.Errorf("%s: %v: %s", script, err, out)
		}
	}
	f, err := os.OpenFile(in, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	// A line that is no JSON is refused alone, and so is a line beyond the limit; the program
	// gets an error.
	if _, err := f.WriteString("13\nno json\n14\n"); err != nil {
		t.Error(err)
	}
	if err := f.Sync(); !errors.Is(err, unix.EINVAL) {
		t.Errorf("fsync after a bad line: %v", err)
	}
	if _, err := f.WriteString(strings.Repeat("1", 3<<20) + "\n15\n"); err != nil && !errors.Is(err, unix.E2BIG) {
		t.Error(err)
	}
	if err = f.Sync(); err != nil && !errors.Is(err, unix.E2BIG) { // the error comes once, here or from the write
		t.Error(err)
	}
	if _, err := f.WriteString("16\n17"); err != nil {
		t.Error(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.OpenFile(in, os.O_RDWR|os.O_APPEND, 0); !errors.Is(err, unix.EACCES) {
		t.Errorf("open for reading and writing: %v", err)
	}
	want = append(want, "13", "14", "16", "17")
	got := n.values("v.in", 1)
	if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(slices.DeleteFunc(got, func(s string) bool { return s == "15" }))), want) {
		t.Errorf("DATA: the stream has %q, not %q", got, want)
	}
	// The rights are the directory's rights.
	if err := errors.Join(os.Chmod(n.Dir, 0o755), os.Chmod(n.at, 0o755), os.Chmod(filepath.Join(n.at, "v"), 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	as := func(script string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "bash", "-c", script)
		cmd.Env = append(os.Environ(), "IN="+in)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := as("echo 20 >> $IN"); err == nil || !strings.Contains(out, "Permission denied") {
		t.Errorf("RIGHTS: a user without w on the directory: %v: %s", err, out)
	}
	if out, err := as("ls $(dirname $IN)"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("setfacl", "-m", "u:12345:rwx", dir).CombinedOutput(); err != nil {
		t.Fatalf("setfacl: %v: %s", err, out)
	}
	if out, err := as("echo 21 >> $IN"); err != nil {
		t.Errorf("a user with w by the ACL: %v: %s", err, out)
	}
	if got := n.values("v.in", 1); !slices.Contains(got, "21") || slices.Contains(got, "20") {
		t.Errorf("DATA: the stream has %q", got)
	}
}

// TestInputFull: a full quota fails fsync and close with EDQUOT, and the gateway takes lines when
// the quota has room again.
func TestInputFull(t *testing.T) {
	n := newInputs(t)
	n.Must("volume", "create", "q", "--attach", "/q", "--quota", "1M")
	n.Must("stream", "create", "/q/in", "--no-table")
	in := filepath.Join(n.at, "q/in/in.jsonl")
	f, err := os.OpenFile(in, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	line := strings.Repeat("x", 1000) + "\n"
	acked := 0
	for err == nil {
		if _, err = f.WriteString(strings.Repeat(line, 100)); err == nil {
			err = f.Sync()
		}
		if err == nil {
			acked += 100
		}
		if acked > 10000 {
			t.Fatal("the quota does not end")
		}
	}
	if !errors.Is(err, unix.EDQUOT) {
		t.Errorf("fsync with a full quota: %v", err)
	}
	n.Must("volume", "set", "q", "--quota", "100M")
	n.Until("lines are taken again", func() error {
		if _, err := f.WriteString("last\n"); err != nil {
			return err
		}
		return f.Sync()
	})
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	got := n.values("q.in", 1)
	if len(got) < acked+1 || got[len(got)-1] != "last" {
		t.Errorf("DATA: %d lines were acknowledged, and the stream has %d", acked+1, len(got))
	}
}
