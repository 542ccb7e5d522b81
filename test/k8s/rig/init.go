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

// initVariable is the environment variable with the view for the first process of a
// machine.
const initVariable = "PENSTOCK_K8S_MACHINE"

// view describes the differences between a rig's machine and the real machine below: the
// state that the machine's first process sets up in its namespaces.
type view struct {
	Name   string // of the host
	Dir    string // the machine's directories: lib, log, and files to show
	Addr   string // address of the machine's bridge
	Prefix int    // bits of the network
	Hosts  map[string]string
}

// Init is the first process of a machine, if this process was started as one; then Init
// does not return. Programs that make machines call Init first.
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
	// The process that waits for the machine reads this byte.
	if _, err := os.NewFile(3, "ready").Write([]byte{1}); err != nil {
		os.Exit(1)
	}
	reap()
}

// reap waits for orphans for ever. A program starts on a machine by entering the
// machine's namespaces, so every child of this process is an orphan.
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

// sysctls are settings of the whole machine that a kubelet would set. The kubelet sees
// files that have the wanted values already, so the real machine keeps its own.
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
		// First private: no mount of this machine is seen outside. Then shared: mounts of
		// pods and of the driver are seen everywhere in this machine.
		{"", "/", "", syscall.MS_REC | syscall.MS_PRIVATE},
		{"", "/", "", syscall.MS_REC | syscall.MS_SHARED},
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
	}
	for _, d := range []string{"lib", "log"} {
		all = append(all,
			mount{filepath.Join(v.Dir, d), "/var/" + d, "", syscall.MS_BIND},
			// A bind mount of a shared mount is the mount's peer, so each mount below
			// would appear twice.
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

// quiet runs a command, and prints its output only if it fails.
func quiet(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
