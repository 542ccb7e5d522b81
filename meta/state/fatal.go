package state

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"
)

// logger hands Pebble's log of the store in a directory to slog.
type logger struct {
	log *slog.Logger
	dir string
}

func (l logger) Infof(string, ...any) {}

func (l logger) Errorf(format string, a ...any) { l.log.Warn("store: " + fmt.Sprintf(format, a...)) }

// Fatalf is called by Pebble where the store can't go on, and must not return. If the
// operating system refused to write or sync the manifest, as a disk does that fails, nobody
// knows what of it is on the disk: the process ends with a line that says so, and its volumes
// are taken over. Everything else is a bug, and ends it with a stack.
func (l logger) Fatalf(format string, a ...any) {
	for _, x := range a {
		err, ok := x.(error)
		if no := unix.Errno(0); ok && errors.As(err, &no) {
			l.log.Error("the disk under the state of a volume can't be written to: the process ends, since nobody knows what of the store is on the disk. "+
				"Nothing that was acknowledged is lost: it is in the journal at etcd. Look at the disk (dmesg, free space, mount options) and start the process again; "+
				"if the disk can't be mended, start it with an empty data directory on another one", "dir", l.dir, "happened", fmt.Sprintf(format, a...))
			os.Exit(1)
		}
	}
	panic(fmt.Sprintf("state: the store in %s: %s", l.dir, fmt.Sprintf(format, a...)))
}
