package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/test/port"
)

// serving are the commands that serve until an interrupt, or that make a server's state and wait
// for servers without a bound. Each has the name of its test.
var serving = map[string]string{
	"penstock chunkserver":  "waits for metadata servers",
	"penstock cluster join": "has no credentials before it ends: join_test.go",
	"penstock csi":          "waits for metadata servers",
	"penstock demo":         "brings a system up",
	"penstock gateway":      "waits for metadata servers",
	"penstock hold":         "serves",
	"penstock meta":         "serves",
	"penstock mirror run":   "waits for metadata servers",
	"penstock mount":        "waits for metadata servers",
	"penstock up":           "serves",
}

// noSuch are arguments that name nothing, by the words of the commands' usage.
var noSuch = map[string]string{
	"CHUNK...":          "9999999999",
	"DIR":               "/no-such/dir",
	"DIR...":            "/no-such/dir",
	"DISK":              "no-such",
	"FILE":              "/no-such/file",
	"GRANT":             "9999",
	"NAME|NUMBER":       "no-such",
	"PATH":              "/no-such",
	"ROLE/NAME":         "client/no-such",
	"VOLUME@SNAPSHOT":   "no-such@none",
	"VOLUME[@SNAPSHOT]": "no-such@none",
}

// moreFlags are the flags without which a command is refused before sending a request.
var moreFlags = map[string][]string{
	"penstock cluster join-token": {"--role", "client"},
	"penstock cluster backup":     {"--dir", "/no-such/dir"},
	"penstock config check":       {"--role", "meta"},
	"penstock mirror resync":      {"--discard"},
	"penstock pin":                {"--holder", "run"},
	"penstock stream password":    {"--file", "/no-such/dir/users.json", "--uid", "1", "--gid", "1", "--no-password"},
	"penstock stream reset-group": {"--to", "earliest"},
	"penstock stream set":         {"--partitions", "2"},
	"penstock unpin":              {"--holder", "run"},
}

// wrongArguments returns arguments for a command's usage, also the optional arguments of
// accept-loss, that name nothing.
func wrongArguments(cmd *cobra.Command) (words []string) {
	for _, word := range strings.Fields(cmd.Use)[1:] {
		if cmd.Name() == "accept-loss" {
			word = strings.Trim(word, "[]")
		}
		if strings.HasPrefix(word, "--") {
			break
		}
		if strings.HasPrefix(word, "[") {
			continue
		}
		named, ok := noSuch[word]
		if !ok {
			named = "no-such"
		}
		words = append(words, named)
	}
	return words
}

// leaves visits the commands without subcommands, in the order of the tree.
func leaves(visit func(path string, cmd *cobra.Command)) {
	every(newRoot(), func(cmd *cobra.Command) {
		path := cmd.CommandPath()
		if cmd.Runnable() && !isGroup(cmd) && cmd.Name() != "help" && !strings.Contains(path, " completion") {
			visit(path, cmd)
		}
	})
}

// called is a command's output and its exit status.
type called struct {
	line      []string
	status    int
	out, said string
}

// call runs a command of this process, at most for two minutes.
func call(t *testing.T, line ...string) called {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	root := newRoot()
	var out, said bytes.Buffer
	root.SetArgs(line)
	root.SetIn(strings.NewReader(""))
	root.SetOut(&out)
	root.SetErr(&said)
	cmd, err := root.ExecuteContextC(ctx)
	status := exitStatus(cmd, err, &said)
	if ctx.Err() != nil {
		t.Errorf("%q did not end by itself", line)
	}
	return called{line, status, out.String(), said.String()}
}

// failed demands that a command ended with a status, printed nothing but an error, and
// named all words in the error.
func (c called) failed(t *testing.T, status int, words ...string) {
	t.Helper()
	if c.status != status {
		t.Errorf("%q ended with status %d, want %d: %s", c.line, c.status, status, c.said)
	}
	if c.out != "" {
		t.Errorf("%q failed and printed %q", c.line, c.out)
	}
	for _, w := range words {
		if !strings.Contains(c.said, w) {
			t.Errorf("%q says nothing of %s: %s", c.line, w, c.said)
		}
	}
	for _, raw := range []string{"rpc error", "context deadline exceeded", "panic", "%!", "goroutine"} {
		if strings.Contains(c.said, raw) {
			t.Errorf("%q shows the inside of the program: %s", c.line, c.said)
		}
	}
}

// TestEveryCommandSaysWhatFailed walks the command tree. Each command that queries a
// cluster is called with no server at the address, without an address, without a
// certificate, with the certificate of a client without grants, and with names of missing
// objects. The command must end with status 1, or 2 for a wrong call, and name the
// object, the cause and the next step. Commands for monitors have other statuses.
func TestEveryCommandSaysWhatFailed(t *testing.T) {
	_, addr, at := ownMeta(t)
	rootNotes = t.TempDir()
	t.Cleanup(func() { rootNotes = "/run/penstock" })
	t.Setenv("PENSTOCK_CLUSTER", "")
	t.Setenv("PENSTOCK_CREDENTIALS", "")
	t.Setenv("XDG_RUNTIME_DIR", rootNotes)
	w := where{cluster: []string{addr}}
	w.credentials.credentials = at("c/admin")
	var token *admin.MakeJoinTokenResponse
	if err := w.api(t.Context(), func(c *admin.Client) (err error) {
		token, err = c.Grants.MakeJoinToken(t.Context(), &admin.MakeJoinTokenRequest{Role: admin.Role_ROLE_CLIENT, Life: durationpb.New(time.Hour)})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if c := call(t, "cluster", "join", "--cluster", addr, "--name", "lab", "--credentials", at("lab"), "--token", token.Token); c.status != exitOK {
		t.Fatal(c.said)
	}
	closed := port.Free(t)
	asking := 0
	var waiting sync.WaitGroup                      // each waits seconds for a server, so all wait at once
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, line := range []string{"volume list", "snapshot list root", "node list"} {
		waiting.Go(func() {
			at := append(strings.Fields(line), "--cluster", silent.Addr().String(), "--credentials", at("c/admin"))
			call(t, at...).failed(t, exitFailed, silent.Addr().String(), "--cluster")
		})
	}
	leaves(func(path string, cmd *cobra.Command) {
		if serving[path] != "" {
			return
		}
		words := wrongArguments(cmd)
		line := append(append(strings.Fields(path)[1:], words...), moreFlags[path]...)
		if cmd.Flags().Lookup("yes") != nil {
			line = append(line, "--yes")
		}
		with := func(more ...string) []string { return append(slices.Clip(line), more...) }
		failed, usage, unknown := exitFailed, exitUsage, exitFailed
		if forMonitors(cmd) {
			failed, usage, unknown = healthCritical, healthUnknown, healthUnknown
		}
		if cmd.Flags().Lookup("cluster") == nil {
			if len(words) > 0 {
				t.Run(path, func(t *testing.T) {
					if c := call(t, line...); c.status != exitFailed && c.status != exitUsage || !strings.Contains(c.said+c.out, "no-such") {
						t.Errorf("%q ended with status %d and said %s", line, c.status, c.said)
					}
				})
			}
			return
		}
		asking++
		if path != "penstock locate" { // the request depends on the file, which is checked first
			waiting.Go(func() {
				c := call(t, with("--cluster", closed, "--credentials", at("c/admin"))...)
				if !forMonitors(cmd) {
					c.failed(t, failed, closed, "--cluster")
				} else if c.status != healthCritical || !strings.Contains(c.out, closed) { // the finding is the command's answer
					t.Errorf("%q ended with status %d and printed %s", c.line, c.status, c.out)
				}
			})
		}
		t.Run(path, func(t *testing.T) {
			if path == "penstock locate" {
				call(t, with("--cluster", addr, "--credentials", at("c/admin"))...).failed(t, failed, "/no-such", "no such file")
				return
			}
			call(t, with()...).failed(t, usage, "--cluster", "--dir")
			call(t, with("--cluster", addr)...).failed(t, usage, addr, "--credentials")
			if path != "penstock gateway list" { // every client of the cluster may list gateways
				call(t, with("--cluster", addr, "--credentials", at("lab"))...).failed(t, unknown, "permission denied", "client/lab", at("lab"))
			}
			if len(words) == 0 || path == "penstock volume create" || path == "penstock stream create" {
				return
			}
			c := call(t, with("--cluster", addr, "--credentials", at("c/admin"))...)
			c.failed(t, failed)
			if !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(c.said, strings.TrimSuffix(w, "@none")) }) {
				t.Errorf("%q does not name what is not there: %s", c.line, c.said)
			}
		})
	})
	waiting.Wait()
	if asking < 50 {
		t.Errorf("%d commands ask a cluster", asking)
	}
}

// TestEmptyListsAreLists walks the command tree. On an empty cluster, each command with
// --output that changes nothing prints JSON without null.
func TestEmptyListsAreLists(t *testing.T) {
	_, addr, at := ownMeta(t)
	asked := map[string]bool{}
	leaves(func(path string, cmd *cobra.Command) {
		reads := slices.Contains([]string{"list", "status", "lost", "members", "usage", "show", "health", "fsck"}, cmd.Name())
		if !reads || serving[path] != "" || cmd.Flags().Lookup("output") == nil || cmd.Flags().Lookup("cluster") == nil {
			return
		}
		line := append(strings.Fields(path)[1:], "--cluster", addr, "--credentials", at("c/admin"), "--output", "json")
		switch args := wrongArguments(cmd); {
		case len(args) > 1, path == "penstock mirror status", path == "penstock stream show":
			return // the command shows an object, which must exist
		case len(args) == 1:
			line = append(line, "root")
		}
		asked[path] = true
		c := call(t, line...)
		if c.status != exitOK && !forMonitors(cmd) {
			t.Errorf("%q ended with status %d: %s", line, c.status, c.said)
			return
		}
		var v any
		if err := json.Unmarshal([]byte(c.out), &v); err != nil {
			t.Errorf("%q: %v: %s", line, err, c.out)
		}
		if n := nulls(v); n != "" {
			t.Errorf("%q prints null in %s: %s", line, n, c.out)
		}
	})
	if len(asked) < 15 {
		t.Errorf("these were asked: %q", slices.Sorted(maps.Keys(asked)))
	}
}

// nulls returns the place of a null in a decoded JSON value, or "".
func nulls(v any) string {
	switch v := v.(type) {
	case nil:
		return "."
	case []any:
		for _, x := range v {
			if n := nulls(x); n != "" {
				return "[]" + n
			}
		}
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			if n := nulls(v[k]); n != "" {
				return k + "." + n
			}
		}
	}
	return ""
}

// TestNothingRunsOnDirectory: for a data directory without a running process, the error
// names the directory and the command that serves it.
func TestNothingRunsOnDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	call(t, "volume", "list", "--dir", dir).failed(t, exitFailed, dir, "penstock up --dir", "--cluster")
}
