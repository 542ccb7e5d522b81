package kernel

import (
	"log/slog"
	"sync"

	"golang.org/x/sys/unix"
)

// The kernel unmounts what is left in a mount name space when the last process in it ends.
// For type fuseblk it asks the server then (DESTROY), and waits for the answer where no
// signal reaches it. If the process that ends has the last descriptor of the device, too,
// nobody answers: it never ends, and sync(2) and drop_caches hang behind the locked super
// block on the whole machine. A container that keeps its mount to itself ends so when all
// its processes are killed at once.
//
// A process that ends leaves its name space before the files that it had open are let go
// of: both are queued (task_work), the unmount last, and the queue is worked off from its
// end. But what the work itself queues comes after all that was queued before. So a
// process that has the device open has its own mount name space open as well: the
// descriptor is the last user of the name space, its release queues the unmount, and by
// the time that this begins the device is closed. The kernel asks nobody then.

// OpenNamespace opens this process's mount name space, once; it stays open until the
// process ends. A control of tests replaces it.
var OpenNamespace = sync.OnceValue(func() error {
	_, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	return err
})

// OutliveNamespace is to be called before a process opens a device, or is given one.
func OutliveNamespace(log *slog.Logger) {
	if err := OpenNamespace(); err != nil {
		log.Warn("this process's mount name space can't be opened: if all processes in it are killed at once and nobody else sees the mount, the last one may hang, and sync(2) with it (docs/operations.md, \"A mount that hangs\")", "err", err)
	}
}
