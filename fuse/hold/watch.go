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

// inspect gives up a mount that no process serves for too long, and lets go on what a
// killed process can't leave: one of its threads may wait, in the kernel, for a
// page that a READ has locked, and the READ for the process. Then its connection
// to us stays; but the process runs no more, and its successor may begin.
//
// A process of which a thread may run still is waited for: on a machine that is short of
// processors a thread that was killed half a second ago may not have had its turn, may
// read one more request and die with it. The kernel resends what was read before it is
// asked to; so that request's caller would wait for ever.
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
			d.refuse(m, t, meta.E("take over mount", meta.Busy, m.name, errors.New("who serves it did not go")))
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
			d.cfg.Logger.Warn("a killed process can't end: its mount goes on without it", "mount", m.name, "pid", conn.pid)
			d.lostServer(m)
		}
	case now.Sub(m.unservedSince) > d.cfg.Patience && !m.aborted:
		d.cfg.Logger.Error("a mount is given up: nobody came to serve it for long", "mount", m.name)
		if m.successor != nil {
			m.successor.socket.Close() // it is to go, too
		}
		if files, bytes, err := Unsynced(m.memory); bytes > 0 || err != nil {
			m.aborted = true
			d.cfg.Logger.Warn("what was written to it and is not durable is kept for a process that sees to that", "mount", m.name, "files", files, "bytes", bytes, "err", err)
			d.endUsers(m)
			break
		}
		files := d.forget(m)
		d.mu.Unlock()
		if err := d.abortMount(m); err != nil {
			d.cfg.Logger.Error("a mount that nobody serves can't be ended", "mount", m.name, "err", err)
		}
		closeAll(files)
		d.mu.Lock()
		d.endIfOver()
	}
	d.mu.Unlock()
}

// endUsers ends a mount for its users, and keeps its memory. Caller holds mu, which
// is released meanwhile.
func (d *Daemon) endUsers(m *record) {
	device := m.device
	d.mu.Unlock()
	if err := d.abortMount(m); err != nil {
		d.cfg.Logger.Error("a mount that nobody serves can't be ended", "mount", m.name, "err", err)
	}
	over, err := overDevice()
	d.mu.Lock()
	if err != nil || m.device != device {
		return
	}
	m.device = over
	device.Close()
}

// overDevice is what stands for the device of a mount that has ended: poll(2) says the
// same of it, and it keeps no connection to the kernel.
func overDevice() (*os.File, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	unix.Close(p[0])
	return os.NewFile(uintptr(p[1]), "over"), nil
}

// cantEnd tells whether a process was killed and none of its threads runs any more,
// or it has been dying for so long that it is taken for such. Only inspect calls it.
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

// abortMount aborts the connection of a mount that can't be served. What is mounted at
// its place now may be another, and its number another's: the number is the
// mount's as long as its device is connected.
func (d *Daemon) abortMount(m *record) error {
	const op = "abort mount"
	if m.number == 0 {
		return meta.E(op, meta.NotFound, m.name, errors.New("its number is not known; it ends when nobody has its device open any more"))
	}
	f, err := d.openAbort(m.number)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it was unmounted
	}
	if err != nil { // in a pod, without a capability
		return meta.E(op, meta.IO, m.name, fmt.Errorf("%w; it ends when nobody has its device open any more", err))
	}
	defer f.Close()
	if kernel.Ended(int(m.device.Fd())) {
		return nil
	}
	_, err = f.WriteString("1")
	return err
}
