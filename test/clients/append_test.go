package clients

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// pageProgram returns the program append.py, and the commands behind it, as docs/streams.md prints them.
func pageProgram(t *testing.T) (program string, commands []string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/streams.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "\n    # append.py:")
	var b strings.Builder
	for line := range strings.Lines("    # append.py:" + text) {
		code, indented := strings.CutPrefix(line, "    ")
		if !indented && strings.TrimSpace(line) != "" {
			break
		}
		if strings.HasPrefix(code, "protoc ") || strings.Contains(code, "| python3 append.py") {
			commands = append(commands, strings.TrimSpace(code))
		} else if len(commands) == 0 {
			b.WriteString(strings.TrimSuffix(code, "\n") + "\n")
		}
	}
	if !ok || len(commands) != 2 {
		t.Fatalf("docs/streams.md has append.py %v, and the commands %q", ok, commands)
	}
	return b.String(), commands
}

// TestPythonAppend runs the program of docs/streams.md: the program appends all lines, and a
// second run with more lines appends only the new lines.
func TestPythonAppend(t *testing.T) {
	g := startServer(t)
	if out, err := exec.Command(*program, "stream", "create", "/v/clicks", "--format", "json", "--dir", g.dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	source, commands := pageProgram(t)
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "append.py"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(command string) string {
		t.Helper()
		command = strings.NewReplacer("stream/ingest", root+"/stream/ingest", "127.0.0.1:9094", g.ingest).Replace(command)
		cmd := exec.CommandContext(t.Context(), "bash", "-ec", command)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH=/usr/bin:/bin") // Debian's Python has the packages
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", command, err, errs.String())
		}
		return string(out) + errs.String()
	}
	run(commands[0])
	for _, n := range []int{2500, 5000, 5000} {
		run(strings.Replace(commands[1], "5000", fmt.Sprint(n), 1))
	}
	out := run("kcat -b " + g.addr + " -q -C -t v.clicks -p 0 -o beginning -e")
	var want strings.Builder
	for i := range 5000 {
		fmt.Fprintln(&want, i+1)
	}
	if out != want.String() {
		t.Errorf("DATA: the stream has %d lines of %d bytes, not 5000 of %d bytes", strings.Count(out, "\n"), len(out), want.Len())
	}
	if out := run(`printf '1\nno json\n' | python3 append.py ` + g.ingest + ` /v/clicks other`); !strings.Contains(out, "refused: the value is not JSON") {
		t.Errorf("a bad line: %q", out)
	}
}
