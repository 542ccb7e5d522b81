package rig

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// initVariable carries a view to the process that becomes a machine's first.
const initVariable = "PENSTOCK_K8S_MACHINE"

// view is how a machine differs from the real one below it: what its first process
// sets up in namespaces of its own.
type view struct {
	Name   string // of the host
	Dir    string // holds what the machine keeps: lib, log and files to show
	Addr   string // of its bridge
	Prefix int    // bits of the network
	Hosts  map[string]string
}

// Init is the first process of a machine, if this process was started as one; then
// it does not return. Programs that make machines call it first.
func Init() {
	text := os.Getenv(initVariable)
	if text == "" {
		return
	}
	var v view
	err := json.Unmarshal([]byte(text), &v)
	if err == nil {
		err = v.set()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// Whoever waits for the machine reads a byte.
	if _, err := os.NewFile(3, "ready").Write([]byte{1}); err != nil {
		os.Exit(1)
	}
	reap()
}

// reap waits for orphans for ever. What a machine runs is started by entering its
// namespaces, so all that ends here was left behind by somebody.
func reap() {
	ended := make(chan os.Signal, 16)
	signal.Notify(ended, syscall.SIGCHLD)
	for {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
		<-ended
	}
}

// sysctls are those of the whole machine that a kubelet would set. It is shown files
// that have the values already, so that the machine below keeps its own.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

func (v view) set() error {
	if err := v.mounts(); err != nil {
		return err
	}
	if err := syscall.Sethostname([]byte(v.Name)); err != nil {
		return err
	}
	return errors.Join(
		ip("link set lo up"),
		ip("link add cni0 type bridge"),
		ip(fmt.Sprintf("addr add %s/%d dev cni0", v.Addr, v.Prefix)),
		ip("link set cni0 up"),
		ip("route add default dev cni0"),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
	)
}

func (v view) mounts() error {
	type mount struct {
		source, target, kind string
		flags                uintptr
	}
	all := []mount{
		// Private first: nothing goes out. Then shared: what pods and the driver
		// mount is seen in all of this machine.
		{"", "/", "", syscall.MS_REC | syscall.MS_PRIVATE},
		{"", "/", "", syscall.MS_REC | syscall.MS_SHARED},
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
	}
	for _, d := range []string{"lib", "log"} {
		all = append(all,
			mount{filepath.Join(v.Dir, d), "/var/" + d, "", syscall.MS_BIND},
			// A bind of something shared is its peer, and then each mount below it
			// is made twice.
			mount{"", "/var/" + d, "", syscall.MS_PRIVATE},
			mount{"", "/var/" + d, "", syscall.MS_SHARED},
		)
	}
	hosts := "127.0.0.1 localhost\n"
	for name, addr := range v.Hosts {
		hosts += addr + " " + name + "\n"
	}
	show := map[string]string{"/etc/hosts": hosts, "/etc/resolv.conf": ""}
	for name, value := range sysctls {
		if _, err := os.Stat("/proc/sys/" + name); err == nil {
			show["/proc/sys/"+name] = value + "\n"
		}
	}
	for at, text := range show {
		f := filepath.Join(v.Dir, "show", strings.ReplaceAll(strings.Trim(at, "/"), "/", "_"))
		if err := os.WriteFile(f, []byte(text), 0o644); err != nil {
			return err
		}
		all = append(all, mount{f, at, "", syscall.MS_BIND})
	}
	for _, m := range all {
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.source, m.target, err)
		}
	}
	return nil
}

func ip(args string) error { return quiet("ip", strings.Fields(args)...) }

// quiet runs a command that says nothing unless it fails.
func quiet(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
