package takeover

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// TestHolderAndServerEndTogether: the holder and the serving process are told to end, in each
// order and at once, as when both pods are deleted. One of the two has the mount until the next
// holder or process has it, and users of the mount see a pause.
func TestHolderAndServerEndTogether(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	p := r.mount()
	r.Until("it hears signals", func() error {
		if !strings.Contains(p.Output(), "penstock mount serves") {
			return fmt.Errorf("not yet: %s", p.Output())
		}
		return nil
	})
	u := r.load(allKinds...)
	r.dial()
	for _, order := range []string{"server-first", "holder-first", "at-once", "at-once"} {
		t.Log(order)
		holder := r.holder
		ends := func(p *spawn.Process, s syscall.Signal) {
			if err := syscall.Kill(p.PID(), s); err != nil {
				t.Fatal(err)
			}
		}
		ended := func(what string, p *spawn.Process) {
			t.Helper()
			r.Until(what, func() error {
				select {
				case <-p.Done():
					return nil
				default:
					return fmt.Errorf("process %d lives", p.PID())
				}
			})
		}
		switch order {
		case "server-first":
			ends(p, syscall.SIGHUP)
			ended("the server's end", p)
			ends(holder, syscall.SIGTERM)
			p = r.serve("/")
			ended("the holder's end, once the mount is served", holder)
			r.startHolder("--patience", "90s")
		case "holder-first":
			ends(holder, syscall.SIGTERM)
			ended("the holder's end, at once: the server has the mount", holder)
			ends(p, syscall.SIGHUP)
			r.startHolder("--patience", "90s")
			ended("the server's end, once a holder has the mount", p)
			p = r.serve("/")
		default:
			ends(holder, syscall.SIGTERM)
			ends(p, syscall.SIGHUP)
			// Each comes again when the previous process has ended.
			select {
			case <-p.Done():
				p = r.serve("/")
				ended("the holder's end, once the mount is served", holder)
				r.startHolder("--patience", "90s")
			case <-holder.Done():
				r.startHolder("--patience", "90s")
				ended("the server's end, once a holder has the mount", p)
				p = r.serve("/")
			case <-time.After(90 * time.Second):
				t.Fatal("neither of them ends")
			}
		}
		r.Until("it is served and held", func() error {
			if pid := r.server(); pid != p.PID() {
				return fmt.Errorf("by %d, not %d: %s", pid, p.PID(), p.Output())
			}
			if !strings.Contains(p.Output(), "penstock mount serves") { // and hears signals
				return fmt.Errorf("not yet: %s", p.Output())
			}
			return nil
		})
	}
	u.end()
	r.clean(p.PID())
}
