package hold

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
)

// watch inspects every mount, until ctx ends.
func (d *Daemon) watch(ctx context.Context) {
	t := time.NewTicker(inspectEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		d.mu.Lock()
		all := slices.Collect(maps.Values(d.mounts))
		d.mu.Unlock()
		for _, m := range all {
			d.inspect(m)
		}
	}
}

// inspect gives up a mount that has had no server for Patience, and replaces a killed server
// that can't end. A thread of such a server may wait, in the kernel, for a page locked by a
// READ, while the READ waits for the server. Then the server's connection to the holder stays
// open; but the process does not run any more, and a successor may begin.
//
// inspect waits for a killed process while a thread may still run. On a machine short of
// processors, a thread killed half a second ago may run once more, read one more request and
// die with the request. The kernel resends only requests read before the successor asks for
// the resending. So the caller of the later request would wait for ever.
func (d *Daemon) inspect(m *record) {
	d.mu.Lock()
	conn := m.server
	d.mu.Unlock()
	now := time.Now()
	gone := conn != nil && d.cantEnd(m, conn.pid, now)

	d.mu.Lock()
	if d.mounts[m.name] != m || m.server != conn {
		d.mu.Unlock()
		return
	}
	for _, t := range slices.Clone(m.waiting) {
		if now.After(t.until) {
			d.refuse(m, t, meta.E("take over mount", meta.Busy, m.name, errors.New("the mount's present process did not end")))
		}
	}
	if gone {
		m.stillLooks++
	} else {
		m.stillLooks = 0
	}
	switch {
	case conn != nil:
		if m.stillLooks >= dyingLooks {
			d.cfg.Logger.Warn("a killed process can't end: a successor takes its mount over", "mount", m.name, "pid", conn.pid)
			d.lostServer(m)
		}
	case now.Sub(m.unservedSince) > d.cfg.Patience && !m.aborted:
		d.cfg.Logger.Error("a mount is given up: no process came to serve it in the holder's patience (--patience)", "mount", m.name)
		if m.successor != nil {
			m.successor.socket.Close() // the successor must go, too
		}
		if files, bytes, err := Unsynced(m.memory); bytes > 0 || err != nil {
			m.aborted = true
			d.cfg.Logger.Warn("the mount has bytes that are not durable: the holder keeps them for a process that makes them durable (penstock client unsynced lists them)", "mount", m.name, "files", files, "bytes", bytes, "err", err)
			d.endUsers(m)
			break
		}
		files := d.forget(m)
		d.mu.Unlock()
		if err := d.abortMount(m); err != nil {
			d.cfg.Logger.Error("a mount without a process can't be ended", "mount", m.name, "err", err)
		}
		closeAll(files)
		d.mu.Lock()
		d.endIfOver()
	}
	d.mu.Unlock()
}

// endUsers ends a mount for its users, and keeps the mount's memory. The caller holds mu;
// endUsers releases mu during the abort.
func (d *Daemon) endUsers(m *record) {
	device := m.device
	d.mu.Unlock()
	if err := d.abortMount(m); err != nil {
		d.cfg.Logger.Error("a mount without a process can't be ended", "mount", m.name, "err", err)
	}
	over, err := overDevice()
	d.mu.Lock()
	if err != nil || m.device != device {
		return
	}
	m.device = over
	device.Close()
}

// overDevice returns a replacement for the device of an ended mount. poll(2) reports the same
// as for the device, but the replacement keeps no connection to the kernel.
func overDevice() (*os.File, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	unix.Close(p[0])
	return os.NewFile(uintptr(p[1]), "over"), nil
}

// cantEnd reports whether a process was killed and no thread of the process can run, or the
// process has been dying for longer than dyingMost. Only inspect calls cantEnd.
func (d *Daemon) cantEnd(m *record, pid int, now time.Time) bool {
	if !kernel.Dying(pid) {
		m.dying = time.Time{}
		return false
	}
	if m.dying.IsZero() {
		m.dying = now
	}
	return kernel.StandsStill(pid) || now.Sub(m.dying) > d.dyingMost
}

// abortMount aborts the connection of a mount without a server. Another mount may now be at
// the same path, and another connection may have the same number; so abortMount checks that
// the mount's device is still connected after opening the abort file.
func (d *Daemon) abortMount(m *record) error {
	const op = "abort mount"
	if m.number == 0 {
		return meta.E(op, meta.NotFound, m.name, errors.New("the number of its connection is not known; the mount ends when no process has its device open any more"))
	}
	f, err := d.openAbort(m.number)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the mount has ended
	}
	if err != nil { // in a pod, without a capability
		return meta.E(op, meta.IO, m.name, fmt.Errorf("%w; the mount ends when no process has its device open any more", err))
	}
	defer f.Close()
	if kernel.Ended(int(m.device.Fd())) {
		return nil
	}
	_, err = f.WriteString("1")
	return err
}
