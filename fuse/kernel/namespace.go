package kernel

import (
	"log/slog"
	"sync"

	"golang.org/x/sys/unix"
)

// The kernel unmounts the remaining mounts of a mount namespace when the namespace's last
// process ends. For type fuseblk the kernel then sends DESTROY to the server, and waits for
// the answer in a place where no signal is received. If the ending process also has the last
// descriptor of the device, no process answers. Then the process never ends, and sync(2) and
// drop_caches hang on the whole machine behind the locked super block. A container with a
// private mount ends like this when all its processes are killed at once.
//
// An ending process leaves its namespace before its open files are released. The kernel queues
// both as task_work, the unmount last, and runs the queue from its end. But work queued by
// running work runs after all work queued before. So a process with the device open also keeps
// its own mount namespace open. The namespace's descriptor is then the last user of the
// namespace, and the descriptor's release queues the unmount. The unmount begins after the
// device is closed, and the kernel sends no DESTROY.

// OpenNamespace opens this process's mount namespace, once; the descriptor stays open until
// the process ends. A control test replaces OpenNamespace.
var OpenNamespace = sync.OnceValue(func() error {
	_, err := unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	return err
})

// OutliveNamespace opens this process's mount namespace; see above. A process must call
// OutliveNamespace before opening or receiving a device.
func OutliveNamespace(log *slog.Logger) {
	if err := OpenNamespace(); err != nil {
		log.Warn("this process's mount name space can't be opened: if all processes in it are killed at once and nobody else sees the mount, the last one may hang, and sync(2) with it (docs/operations.md, \"A mount that hangs\")", "err", err)
	}
}
