package failover

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"time"
)

// stallLimit is how long a client may wait before everybody's stacks are
// written down: longer than any move of a volume takes.
const stallLimit = 15 * time.Second

// dumpStacks writes the stacks of this process and of all servers that answer to a file, for a
// person who looks for the cause of a wait, and returns the file's name.
func (s *site) dumpStacks(why string) (string, error) {
	f, err := os.CreateTemp("", "failover-stacks-")
	if err != nil {
		return "", err
	}
	defer f.Close()
	fmt.Fprintf(f, "%s %s\n\n=== the test and its clients\n", time.Now().Format(time.RFC3339Nano), why)
	if err := pprof.Lookup("goroutine").WriteTo(f, 2); err != nil {
		return f.Name(), err
	}
	for _, m := range s.metas {
		fmt.Fprintf(f, "\n=== %s\n", m.name)
		if err := m.stacks(f); err != nil {
			fmt.Fprintln(f, err) // the server may be dead, or stand still
		}
	}
	return f.Name(), nil
}

// stacks asks the server's admin port for the stacks of its goroutines.
func (m *server) stacks(w io.Writer) error {
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(m.dir, "admin.sock"))
		},
	}}
	r, err := c.Get("http://admin/debug/pprof/goroutine?debug=2")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", m.name, r.Status)
	}
	_, err = io.Copy(w, r.Body)
	return err
}
