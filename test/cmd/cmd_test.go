// Package cmd runs the built binary's command line through the scripts in
// testdata: what is printed, where, and with which exit status.
package cmd

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(e *testscript.Env) error {
			// Every mount left by a script, and all mounts below, go.
			e.Defer(func() {
				for _, dir := range []string{"mnt", "mnt2"} {
					if err := spawn.Unmount(filepath.Join(e.WorkDir, dir)); err != nil {
						t.Error(err)
					}
				}
			})
			e.Setenv("PENSTOCK_INDEX_DIR", filepath.Join(e.WorkDir, "indexes"))
			e.Setenv("PATH", filepath.Dir(program.Path)+string(os.PathListSeparator)+e.Getenv("PATH"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// served DIR: waits until something is mounted at DIR and serves.
			"served": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) != 1 {
					ts.Fatalf("usage: served DIR")
				}
				dir := ts.MkAbs(args[0])
				for deadline := time.Now().Add(90 * time.Second); !spawn.Mounted(dir); time.Sleep(5 * time.Millisecond) {
					if time.Now().After(deadline) {
						ts.Fatalf("nothing is mounted at %s", dir)
					}
				}
			},
			// port NAME: sets NAME to an unused TCP port.
			"port": func(ts *testscript.TestScript, neg bool, args []string) {
				addr, err := port.Find()
				ts.Check(err)
				_, n, err := net.SplitHostPort(addr)
				ts.Check(err)
				ts.Setenv(args[0], n)
			},
			// eventually COMMAND...: the command succeeds within a minute; with !, it fails.
			"eventually": func(ts *testscript.TestScript, neg bool, args []string) {
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
					err := ts.Exec(args[0], args[1:]...)
					if (err != nil) == neg {
						return
					}
					if time.Now().After(deadline) {
						ts.Fatalf("still: %v", err)
					}
				}
			},
			// digest-of VOLUME SNAPSHOT NAME: sets NAME to the digest, once there is one.
			"digest-of": func(ts *testscript.TestScript, neg bool, args []string) {
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
					ts.Check(ts.Exec("penstock", "snapshot", "show", "--dir", "data", args[0], args[1]))
					for line := range strings.Lines(ts.ReadFile("stdout")) {
						if f := strings.Fields(line); len(f) == 2 && f[0] == "digest" {
							ts.Setenv(args[2], f[1])
							return
						}
					}
					if time.Now().After(deadline) {
						ts.Fatalf("no digest of %s@%s", args[0], args[1])
					}
				}
			},
			// disk-of FILE NAME: sets NAME to the id of the first disk in a list as JSON.
			"disk-of": func(ts *testscript.TestScript, neg bool, args []string) {
				var disks []struct{ ID string }
				ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &disks))
				if len(disks) == 0 {
					ts.Fatalf("no disk")
				}
				ts.Setenv(args[1], disks[0].ID)
			},
			// same A B: the two texts are the same.
			"same": func(ts *testscript.TestScript, neg bool, args []string) {
				if (args[0] == args[1]) == neg {
					ts.Fatalf("%s and %s", args[0], args[1])
				}
			},
			// renewed FILE: the listed pins of volume images are not those in the file any more.
			"renewed": func(ts *testscript.TestScript, neg bool, args []string) {
				before := ts.ReadFile(args[0])
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
					ts.Check(ts.Exec("penstock", "pin", "list", "--dir", "data", "images", "-o", "json"))
					if ts.ReadFile("stdout") != before {
						return
					}
					if time.Now().After(deadline) {
						ts.Fatalf("nothing was renewed: %s", before)
					}
				}
			},
			// told SINCE REGEXP: the last event of volume inbox after a number is so within a minute.
			"told": func(ts *testscript.TestScript, neg bool, args []string) {
				want := regexp.MustCompile(args[1])
				for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
					ts.Check(ts.Exec("penstock", "events", "--dir", "data", "inbox", "--since", args[0]))
					if want.MatchString(strings.TrimSpace(ts.ReadFile("stdout"))) {
						return
					}
					if time.Now().After(deadline) {
						ts.Fatalf("not told of %s", args[1])
					}
				}
			},
			// revoke FILE: revokes the join token in a file.
			"revoke": func(ts *testscript.TestScript, neg bool, args []string) {
				id := strings.Split(ts.ReadFile(args[0]), ".")[2]
				ts.Check(ts.Exec("penstock", "cluster", "join-token", "--revoke", id, "--credentials", "cred/admin"))
			},
			// outlived FILE COMMAND...: the command succeeds each second until the certificate
			// in a file does not hold any more.
			"outlived": func(ts *testscript.TestScript, neg bool, args []string) {
				var end time.Time
				for rest, block := []byte(ts.ReadFile(args[0])), (*pem.Block)(nil); end.IsZero(); {
					if block, rest = pem.Decode(rest); block == nil {
						ts.Fatalf("no certificate in %s", args[0])
					}
					if block.Type == "CERTIFICATE" {
						c, err := x509.ParseCertificate(block.Bytes)
						ts.Check(err)
						end = c.NotAfter
					}
				}
				for time.Now().Before(end) {
					ts.Check(ts.Exec(args[1], args[2:]...))
					time.Sleep(min(time.Second, max(0, time.Until(end))))
				}
			},
			// metric SOCKET NAME N, or >N: what a part's metrics say within 90 seconds, all disks together.
			"metric": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) != 3 {
					ts.Fatalf("usage: metric SOCKET NAME [>]N")
				}
				least, more := strings.CutPrefix(args[2], ">")
				want, err := strconv.ParseFloat(least, 64)
				ts.Check(err)
				for deadline := time.Now().Add(90 * time.Second); ; time.Sleep(50 * time.Millisecond) {
					sum, err := metric(ts.MkAbs(args[0]), args[1])
					if err == nil && (more && sum > want || !more && sum == want) {
						ts.Logf("%s is %v", args[1], sum)
						return
					}
					if time.Now().After(deadline) {
						ts.Fatalf("%s is %v, want %s: %v", args[1], sum, args[2], err)
					}
				}
			},
			// status N COMMAND...: the command must end with exit status N.
			"status": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) < 2 {
					ts.Fatalf("usage: status N COMMAND...")
				}
				want := args[0]
				err := ts.Exec(args[1], args[2:]...)
				got := 0
				var exit *exec.ExitError
				if errors.As(err, &exit) {
					got = exit.ExitCode()
				} else if err != nil {
					ts.Fatalf("%v", err)
				}
				if fmt.Sprint(got) != want {
					ts.Fatalf("exit status %d, want %s", got, want)
				}
			},
		},
	})
}

// metric sums the values of a metric that a part serves on a socket.
func metric(socket, name string) (sum float64, err error) {
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer client.CloseIdleConnections()
	re, err := client.Get("http://part/metrics")
	if err != nil {
		return 0, err
	}
	defer re.Body.Close()
	b, err := io.ReadAll(re.Body)
	if err != nil {
		return 0, err
	}
	found := false
	for line := range strings.Lines(string(b)) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), name)
		if !ok || !strings.HasPrefix(rest, "{") && !strings.HasPrefix(rest, " ") {
			continue
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			return 0, err
		}
		found, sum = true, sum+v
	}
	if !found {
		return 0, fmt.Errorf("no metric %s", name)
	}
	return sum, nil
}
