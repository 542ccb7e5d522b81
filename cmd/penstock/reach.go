package main

import (
	"fmt"
	"os"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// advisedError is an error with advice for the user, which explain prints instead of the
// advice for the error's kind.
type advisedError struct {
	err    error
	advice string
}

func (e *advisedError) Error() string { return e.err.Error() }
func (e *advisedError) Unwrap() error { return e.err }

// open returns the cluster's addresses and the caller's credentials, which are nil for Unix
// sockets. Errors: a usageError for TCP without credentials.
func (w *where) open() ([]string, *peer.Credentials, error) {
	addrs, err := w.addrs()
	if err != nil {
		return nil, nil, err
	}
	creds, err := w.credentials.open()
	if err != nil {
		return nil, nil, err
	}
	for _, a := range addrs {
		if creds == nil && !strings.HasPrefix(a, "unix:") {
			return nil, nil, usagef("metadata server %s is reached by TCP, which needs a certificate: give --credentials DIR (or PENSTOCK_CREDENTIALS), as 'penstock cluster join' makes it, or --insecure for a loopback address", a)
		}
	}
	w.opened = creds
	return addrs, creds, nil
}

// origin names the setting that the cluster's addresses come from.
func (w *where) origin() string {
	switch {
	case len(w.cluster) > 0:
		return "--cluster"
	case w.dir != "":
		return "--dir"
	case os.Getenv("PENSTOCK_CLUSTER") != "":
		return "PENSTOCK_CLUSTER"
	}
	return "the 'penstock up' of this machine"
}

// advise adds advice to err: for a refusal, the credentials in use; for a cluster of which no
// server answered (unreached), the origin of the addresses.
func (w *where) advise(err error, unreached bool) error {
	switch kind := meta.KindOf(err); {
	case err == nil:
		return nil
	case kind == meta.AccessDenied && w.opened.Identity().Role != "":
		who := w.opened.Identity()
		advice := fmt.Sprintf("the credentials in use are those of %s, in %s; give those of an administrator with --credentials", who, w.opened.Dir())
		if who.Role == peer.Client {
			advice += fmt.Sprintf(",\n  or have one grant the right on the volume: 'penstock grant add %s VOLUME --rights read|write|admin'", who.Name)
		}
		return &advisedError{err, advice}
	case unreached && kind == meta.Unavailable:
		return &advisedError{err, fmt.Sprintf("no metadata server answered; the addresses are from %s: see that servers run there (systemctl status penstock-meta),\n  or say where they are with --cluster", w.origin())}
	}
	return err
}
