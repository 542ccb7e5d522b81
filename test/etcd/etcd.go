// Package etcd owns a real etcd of three members for tests of single packages:
// each member a process of its own on loopback, to be killed, stopped and
// started again. The process is the test's own program: its TestMain calls Main
// first.
package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/port"
)

const variable = "PENSTOCK_TEST_ETCD_MEMBER"

// config is the configuration of a member's process.
type config struct {
	Name, Dir, Client, Peer, Initial string
	Quota                            int64
}

// Main runs a member, and never returns, in a process that was started as a member.
func Main() {
	v := os.Getenv(variable)
	if v == "" {
		return
	}
	var m config
	err := json.Unmarshal([]byte(v), &m)
	if err == nil {
		err = run(m)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func run(m config) error {
	c := embed.NewConfig()
	c.Name, c.Dir = m.Name, m.Dir
	client, err := url.Parse(m.Client)
	if err != nil {
		return err
	}
	peer, err := url.Parse(m.Peer)
	if err != nil {
		return err
	}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
	c.InitialCluster, c.InitialClusterToken = m.Initial, "test"
	c.TickMs, c.ElectionMs = 50, 500
	c.QuotaBackendBytes = m.Quota
	c.LogLevel, c.LogOutputs = "panic", []string{"/dev/null"}
	// The members share one disk: a sync would measure the machine, not the test.
	c.UnsafeNoFsync = true
	e, err := embed.StartEtcd(c)
	if err != nil {
		return err
	}
	return <-e.Err()
}

// Member is one of the three members.
type Member struct {
	cfg config
	cmd *exec.Cmd
}

// Trio is the three.
type Trio struct {
	t       testing.TB
	Members []*Member
}

// Start runs three members and waits until they serve. Quota is etcd's, in bytes; zero means the
// default.
func Start(t testing.TB, quota int64) *Trio {
	t.Helper()
	dir, err := os.MkdirTemp("", "trio")
	if err != nil {
		t.Fatal(err)
	}
	x := &Trio{t: t}
	t.Cleanup(func() {
		for _, m := range x.Members {
			m.Kill()
		}
		os.RemoveAll(dir)
	})
	var initial []string
	for i := range 3 {
		m := &Member{cfg: config{
			Name: fmt.Sprint("e", i), Dir: filepath.Join(dir, fmt.Sprint(i)), Quota: quota,
			Client: "http://" + port.Free(t), Peer: "http://" + port.Free(t),
		}}
		initial = append(initial, m.cfg.Name+"="+m.cfg.Peer)
		x.Members = append(x.Members, m)
	}
	for _, m := range x.Members {
		m.cfg.Initial = strings.Join(initial, ",")
		m.Start(t)
	}
	x.Await(90 * time.Second)
	return x
}

// Endpoints are all members'.
func (x *Trio) Endpoints() (all []string) {
	for _, m := range x.Members {
		all = append(all, m.cfg.Client)
	}
	return all
}

// Client is a client of all members.
func (x *Trio) Client() *clientv3.Client {
	x.t.Helper()
	cli, err := cluster.Dial(x.Endpoints(), nil)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { cli.Close() })
	return cli
}

// Await waits until a write goes through.
func (x *Trio) Await(within time.Duration) {
	x.t.Helper()
	cli, err := cluster.Dial(x.Endpoints(), nil)
	if err != nil {
		x.t.Fatal(err)
	}
	defer cli.Close()
	for deadline := time.Now().Add(within); ; {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = cli.Put(ctx, "/awake", "")
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			x.t.Fatalf("etcd does not serve: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Leader is the member that leads; nil if no leader is known.
func (x *Trio) Leader() *Member {
	cli, err := cluster.Dial(x.Endpoints(), nil)
	if err != nil {
		x.t.Fatal(err)
	}
	defer cli.Close()
	for _, m := range x.Members {
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		r, err := cli.Status(ctx, m.cfg.Client)
		cancel()
		if err == nil && r.Leader == r.Header.MemberId {
			return m
		}
	}
	return nil
}

// Start runs the member's process.
func (m *Member) Start(t testing.TB) {
	t.Helper()
	b, err := json.Marshal(m.cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.cmd = exec.Command(os.Args[0])
	m.cmd.Env = append(os.Environ(), variable+"="+string(b))
	m.cmd.Stderr = os.Stderr
	if err := child.Spawn(m.cmd); err != nil {
		t.Fatal(err)
	}
}

// Kill ends the process with SIGKILL.
func (m *Member) Kill() {
	if m.cmd == nil {
		return
	}
	m.cmd.Process.Kill()
	m.cmd.Wait()
	m.cmd = nil
}

// Pause stops the process unnoticed by the process; Resume lets the process go on.
func (m *Member) Pause() { m.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume is told at Pause.
func (m *Member) Resume() { m.cmd.Process.Signal(syscall.SIGCONT) }
