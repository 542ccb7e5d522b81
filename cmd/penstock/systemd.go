package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
)

// systemd's descriptor store (sd_notify(3), sd_listen_fds(3)): a service sends
// descriptors with a name to $NOTIFY_SOCKET, and gets them back when it is started
// again, from number 3 on, with their names in $LISTEN_FDNAMES.
//
// The names here are of a hash: the mount point may hold what names may not. It
// stands in the memory that is stored.

// systemd is the manager that started this process.
type systemd struct {
	socket string
	// max is how many descriptors it keeps for this unit (FileDescriptorStoreMax); 0:
	// it does not say, before version 254. What is beyond it closes, and says nothing.
	max    int
	stored map[string]bool // names of mounts that it has, with two descriptors each
}

// firstFD is the number of the first descriptor that systemd passes.
const firstFD = 3

const deviceName, memoryName = "-device", "-memory"

// fromSystemd takes what systemd passed: nil, nil if no systemd waits for us. What
// is no whole mount is let go, for the sake of the others: the holder before was
// killed when it had stored one descriptor of two. Who serves it puts them again.
func fromSystemd(env func(string) string, log *slog.Logger) (*systemd, map[string][]*os.File, error) {
	socket := env("NOTIFY_SOCKET")
	if socket == "" {
		return nil, nil, nil
	}
	s := &systemd{socket: socket, stored: map[string]bool{}}
	if n, err := strconv.Atoi(env("FDSTORE")); err == nil {
		s.max = n
	}
	if pid, err := strconv.Atoi(env("LISTEN_PID")); err != nil || pid != os.Getpid() {
		return s, nil, nil
	}
	n, err := strconv.Atoi(env("LISTEN_FDS"))
	names := strings.Split(env("LISTEN_FDNAMES"), ":")
	if err != nil || n < 0 || n != len(names) {
		return nil, nil, meta.E("take descriptors", meta.Invalid, "LISTEN_FDS", errors.New("they don't match LISTEN_FDNAMES"))
	}
	type pair struct{ device, memory *os.File }
	pairs := make(map[string]pair)
	for i, name := range names {
		syscall.CloseOnExec(firstFD + i)
		f := os.NewFile(uintptr(firstFD+i), name)
		if hash, ok := strings.CutSuffix(name, deviceName); ok {
			pairs[hash] = pair{f, pairs[hash].memory}
		} else if hash, ok := strings.CutSuffix(name, memoryName); ok {
			pairs[hash] = pair{pairs[hash].device, f}
		} else {
			f.Close()
		}
	}
	left := make(map[string][]*os.File)
	for hash, p := range pairs {
		dir, err := "", error(meta.E("take descriptors", meta.Corrupt, hash, errors.New("one of two is missing")))
		if p.device != nil && p.memory != nil {
			dir, err = fuse.LeftDir(int(p.memory.Fd()))
		}
		if err == nil {
			left[dir], s.stored[hash] = []*os.File{p.device, p.memory}, true
			continue
		}
		if meta.KindOf(err) != meta.Corrupt { // another version of this program may read it
			return nil, nil, err
		}
		log.Error("a mount that was stored is not held", "name", hash, "err", err)
		if err := s.remove(hash); err != nil {
			return nil, nil, err
		}
		for _, f := range []*os.File{p.device, p.memory} {
			if f != nil {
				f.Close()
			}
		}
	}
	return s, left, nil
}

func storeName(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return "penstock-" + hex.EncodeToString(sum[:8])
}

// notifyIn bounds the wait for systemd to read its messages.
const notifyIn = 5 * time.Second

// notify sends one message to systemd.
func (s *systemd) notify(text string, fds ...*os.File) error {
	name := s.socket
	if strings.HasPrefix(name, "@") { // an abstract one
		name = "\x00" + name[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return meta.E("notify systemd", meta.Unavailable, s.socket, err)
	}
	defer c.Close()
	var oob []byte
	if len(fds) > 0 {
		var n []int
		for _, f := range fds {
			n = append(n, int(f.Fd()))
		}
		oob = unix.UnixRights(n...)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return meta.E("notify systemd", meta.IO, s.socket, err)
	}
	if err := c.SetWriteDeadline(time.Now().Add(notifyIn)); err != nil {
		return meta.E("notify systemd", meta.IO, s.socket, err)
	}
	// Not by WriteMsgUnix: it refuses a datagram socket that is connected.
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendmsg(int(fd), []byte(text), oob, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(sent, syscall.EAGAIN)
	})
	if err = errors.Join(err, sent); err != nil {
		return meta.E("notify systemd", meta.IO, s.socket, err)
	}
	return nil
}

func (s *systemd) ready() error { return s.notify("READY=1") }

// Store puts a mount's device and memory into systemd's store, instead of what is
// there under this name. Errors: ResourceExceeded (it has no room), Unavailable, IO.
func (s *systemd) Store(dir string, fds ...*os.File) error {
	if err := s.Remove(dir); err != nil {
		return err
	}
	name := storeName(dir)
	if s.max > 0 && 2*len(s.stored)+len(fds) > s.max {
		return meta.E("store descriptors", meta.ResourceExceeded, dir, fmt.Errorf("systemd keeps %d descriptors of this unit, and has those of %d mounts: raise FileDescriptorStoreMax", s.max, len(s.stored)))
	}
	s.stored[name] = true
	for i, suffix := range []string{deviceName, memoryName} {
		// FDPOLL=0: the device always reports an error or hang-up condition to poll
		// when its connection is aborted, and is to be dropped by us, not then.
		if err := s.notify(fmt.Sprintf("FDSTORE=1\nFDNAME=%s%s\nFDPOLL=0", name, suffix), fds[i]); err != nil {
			return err
		}
	}
	return nil
}

// Remove takes it out.
func (s *systemd) Remove(dir string) error { return s.remove(storeName(dir)) }

func (s *systemd) remove(name string) error {
	delete(s.stored, name)
	return errors.Join(s.notify("FDSTOREREMOVE=1\nFDNAME="+name+deviceName), s.notify("FDSTOREREMOVE=1\nFDNAME="+name+memoryName))
}
