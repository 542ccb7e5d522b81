package streams

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

// members is a cluster with certificates, a volume v with the stream s, and gateways with users and
// TLS whose certificate no mount knows.
type members struct {
	*program.Rig
	pki   *authority
	users string
}

func newMembers(t *testing.T) *members {
	m := &members{Rig: program.NewRig(t), pki: newAuthority(t)}
	m.pki.make("server", &x509.Certificate{DNSNames: []string{"gateways.example"}})
	m.users = m.pki.file("users.json")
	(&guarded{authority: m.pki, users: m.users}).password("ann", "secret", "--uid", "1000", "--gid", "1000")
	m.Secure()
	m.Run("meta", "--dir", filepath.Join(m.Dir, "m"), "--listen", m.Addr, "--credentials", m.Credentials("meta"))
	m.Until("the metadata server answers", func() error { _, err := m.Ctl("volume", "list"); return err })
	m.Join("chunkserver", "c1")
	m.Run("chunkserver", "--data", filepath.Join(m.Dir, "c"), "--cluster", m.Addr, "--listen", port.Free(t), "--credentials", m.Credentials("c1"))
	m.Until("the volume", func() error {
		_, err := m.Ctl("volume", "create", "v", "--attach", "/v", "--replicas", "1")
		return err
	})
	for _, name := range []string{"writer", "reader"} {
		m.Join("client", name)
	}
	m.Must("grant", "add", "client/writer", "v", "--rights", "write")
	m.Must("grant", "add", "client/reader", "v", "--rights", "read")
	m.Must("grant", "add", "gateway/*", "root", "--rights", "read")
	m.Must("grant", "add", "gateway/*", "v", "--rights", "write")
	m.Must("stream", "create", "/v/s", "--format", "json")
	return m
}

// gateway joins and starts a gateway.
func (m *members) gateway(name string) *spawn.Process {
	m.T.Helper()
	if _, err := os.Stat(m.Credentials(name)); err != nil {
		m.Join("gateway", name)
	}
	at := port.Free(m.T)
	p := m.Run("gateway", "--cluster", m.Addr, "--credentials", m.Credentials(name), "--kafka", port.Free(m.T), "--ingest", at, "--admin", "none",
		"--stream-users", m.users, "--tls-cert", m.pki.file("server.crt"), "--tls-key", m.pki.file("server.key"))
	m.Until("the gateway answers", func() error {
		c, err := net.Dial("tcp", at)
		if err == nil {
			c.Close()
		}
		return err
	})
	return p
}

// mount mounts the volume v as a client of the cluster, and returns the stream's directory and the
// file of the mount's log.
func (m *members) mount(client string) (dir, log string) {
	m.T.Helper()
	at := filepath.Join(m.Dir, client)
	log = at + ".log"
	if err := os.Mkdir(at, 0o755); err != nil {
		m.T.Fatal(err)
	}
	m.Run("mount", "--cluster", m.Addr, "--credentials", m.Credentials(client), "--log-file", log, "--admin=none", "v:/", at)
	m.T.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_FORCE|unix.MNT_DETACH) })
	dir = filepath.Join(at, "s")
	m.Until("the mount of "+client, func() error { _, err := os.Stat(filepath.Join(dir, "stream.json")); return err })
	return dir, log
}

// append appends a line through a mount, and waits for the acknowledgement.
func (m *members) append(dir, line string) error {
	f, err := os.OpenFile(filepath.Join(dir, "in.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(line + "\n")
	return errors.Join(err, f.Sync(), f.Close())
}

// has reports how often the log of the stream has a text.
func (m *members) has(dir, text string) (n int) {
	m.T.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "log", "*", "*.seg"))
	for _, name := range files {
		var b []byte
		b, err = os.ReadFile(name)
		n += strings.Count(string(b), text)
	}
	if err != nil {
		m.T.Fatal(err)
	}
	return n
}

// TestMembers: a mount without any flag for gateways finds gateways through the metadata servers, logs
// in with its certificate of the cluster, and may append what its grants permit, whichever gateways
// run.
func TestMembers(t *testing.T) {
	m := newMembers(t)
	writes, wlog := m.mount("writer")
	reads, rlog := m.mount("reader")
	if err := m.append(writes, `{"n":0}`); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("without a gateway: %v", err)
	}
	first := m.gateway("g1")
	told := func(err error, log string) {
		t.Helper()
		if err != nil {
			b, _ := os.ReadFile(log)
			t.Fatalf("%v; the mount's log:\n%s", err, b)
		}
	}
	// The mount goes by the list of a moment ago.
	m.Until("the mount finds the gateway", func() error {
		err := m.append(writes, `{"n":1}`)
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			told(err, wlog)
		}
		return err
	})
	if n := m.has(reads, `{"n":1}`); n != 1 {
		t.Errorf("DATA: the stream has the record %d times", n)
	}
	// The reader's grant permits no append, although user 0 may write the directory.
	if err := m.append(reads, `{"n":2}`); !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		t.Errorf("a mount that may only read appends: %v", err)
	}
	if n := m.has(reads, `{"n":2}`); n != 0 {
		t.Error("DATA: the record of a mount that may only read is in the stream")
	}
	if b, err := os.ReadFile(rlog); err != nil || !strings.Contains(string(b), "no grant permits client/reader to write") {
		t.Errorf("the log of the mount that was refused does not say why: %v\n%s", err, b)
	}
	// Another gateway takes over, at another address.
	m.gateway("g2")
	first.Kill()
	<-first.Done()
	for n := range 3 {
		line := fmt.Sprintf(`{"n":%d}`, 10+n)
		told(m.append(writes, line), wlog)
		if n := m.has(writes, line); n != 1 {
			t.Errorf("DATA: the stream has %s %d times", line, n)
		}
	}
}
