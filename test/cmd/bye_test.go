package cmd

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/program"
)

// TestByeIsNotAnswered: a command whose work was answered has succeeded, even without an answer
// to the goodbye.
func TestByeIsNotAnswered(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/var/tmp", "pb-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p, err := spawn.Start(t.Context(), spawn.Config{Binary: program.Path, Dir: filepath.Join(dir, "d")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Kill() })
	between, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { between.Close() })
	var byes atomic.Int64
	go func() {
		for {
			client, err := between.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("unix", filepath.Join(dir, "d", "meta.sock"))
			if err != nil {
				client.Close()
				continue
			}
			go func() { io.Copy(client, server); client.Close() }()
			go func() { withoutBye(server, client, &byes); server.Close() }()
		}
	}()
	out, err := exec.CommandContext(t.Context(), program.Path, "volume", "create", "made", "--cluster", "unix:"+filepath.Join(dir, "s")).CombinedOutput()
	if err != nil || len(out) == 0 {
		t.Errorf("%v: %s", err, out)
	}
	if byes.Load() == 0 {
		t.Error("no goodbye came by: nothing is tested")
	}
	if out, err := exec.CommandContext(t.Context(), program.Path, "volume", "show", "made", "--dir", filepath.Join(dir, "d")).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// withoutBye hands on every frame but the client's goodbye.
func withoutBye(to io.Writer, from io.Reader, byes *atomic.Int64) error {
	for {
		head := make([]byte, wire.HeaderSize)
		if _, err := io.ReadFull(from, head); err != nil {
			return err
		}
		n := binary.LittleEndian.Uint32(head) + 4
		if n < wire.HeaderSize || n > wire.MaxFrame+4 {
			return errors.New("no frame")
		}
		frame := make([]byte, n)
		copy(frame, head)
		if _, err := io.ReadFull(from, frame[len(head):]); err != nil {
			return err
		}
		if wire.Type(frame[5]) == wire.TBye {
			byes.Add(1)
			continue
		}
		if _, err := to.Write(frame); err != nil {
			return err
		}
	}
}
