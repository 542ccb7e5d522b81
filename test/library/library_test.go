// Package library uses the client library as a Go program does, against a cluster of
// processes with certificates: the effects and refusals of the exported calls about
// volumes, snapshots, pins, clones and events.
package library

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/operator"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// badNames are given to no volume and no snapshot.
var badNames = []string{"", ".", "..", "a/b", "a@b", "a:b", "a\nb", "a\x00b", "a\xff"}

// cluster is a metadata server and a chunk server.
type cluster struct{ *program.Rig }

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{program.NewRig(t)}
	c.Secure()
	c.Run("meta", "--dir", filepath.Join(c.Dir, "m"), "--listen", c.Addr, "--credentials", c.Credentials("meta"))
	c.Until("the metadata server answers", func() error { _, err := c.Ctl("volume", "show", "root"); return err })
	c.Join("chunkserver", "c")
	c.Run("chunkserver", "--data", filepath.Join(c.Dir, "c"), "--cluster", c.Addr, "--listen", "127.0.0.1:0", "--credentials", c.Credentials("c"))
	return c
}

// admin returns a client of the cluster's administrator, which commits its writes only on
// request.
func (c *cluster) admin() *penstock.Client { c.T.Helper(); return c.dial("admin") }

// user returns a client with rights on a volume.
func (c *cluster) user(name, volume, rights string) *penstock.Client {
	c.T.Helper()
	c.Join("client", name)
	c.Must("grant", "add", name, volume, "--rights", rights)
	return c.dial(name)
}

func (c *cluster) dial(name string) *penstock.Client {
	c.T.Helper()
	creds, err := peer.Load(c.Credentials(name), nil)
	if err != nil {
		c.T.Fatal(err)
	}
	cl, err := penstock.Dial(c.T.Context(), penstock.Config{Meta: []string{c.Addr}, Creds: creds, Name: name, FlushEvery: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		cl.Close(ctx)
	})
	return cl
}

// operator administers with the credentials of a name.
func (c *cluster) operator(name string) *operator.Operator {
	c.T.Helper()
	creds, err := peer.Load(c.Credentials(name), nil)
	c.must(err)
	return operator.New(c.T, c.Addr, creds)
}

// volume makes a volume and opens it.
func (c *cluster) volume(cl *penstock.Client, name string) *penstock.Volume {
	c.T.Helper()
	vols, err := cl.Volumes()
	if err == nil {
		_, err = vols.Create(c.T.Context(), name, meta.Policy{Replicas: 1}, penstock.VolumeWords{})
	}
	c.must(err)
	return c.open(cl, name)
}

func (c *cluster) open(cl *penstock.Client, name string) *penstock.Volume {
	c.T.Helper()
	v, err := cl.Volume(c.T.Context(), name)
	c.must(err)
	return v
}

func (c *cluster) must(err error) {
	c.T.Helper()
	if err != nil {
		c.T.Fatal(err)
	}
}

// put writes and syncs a file.
func (c *cluster) put(v *penstock.Volume, path, text string) {
	c.T.Helper()
	c.must(v.Tree().WriteFile(c.T.Context(), path, []byte(text), 0o644))
}

// has compares a file's content.
func (c *cluster) has(v *penstock.Volume, path, text string) {
	c.T.Helper()
	b, err := v.Tree().ReadFile(c.T.Context(), path)
	if err != nil {
		c.T.Fatalf("%s of %s: %v", path, v.Name(), err)
	}
	if string(b) != text {
		c.T.Fatalf("DATA: %s of %s is %.100q, it should be %.100q", path, v.Name(), b, text)
	}
}

// refused demands an error of a kind, whose text contains the words.
func (c *cluster) refused(err error, kind meta.Kind, words ...string) {
	c.T.Helper()
	if !errors.Is(err, kind) {
		c.T.Errorf("%v, it should be of the kind %v", err, kind)
	}
	for _, w := range words {
		if err != nil && !strings.Contains(err.Error(), w) {
			c.T.Errorf("%v says nothing of %s", err, w)
		}
	}
}

// second returns the error of a call that also returns a value.
func second[T any](_ T, err error) error { return err }
