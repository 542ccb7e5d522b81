package operate

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/etcd"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

// nobody is the number of the user whom the units call penstock.
const nobody = 61234

// machine is a root directory in which a unit's process is run as systemd would run
// it, as far as files go: with the user and the arguments of the unit, and with
// nothing writable but what the unit says.
type machine struct {
	*rig
	root string
}

// newMachine makes a machine as `systemd-tmpfiles --create penstock.conf` leaves a machine.
func newMachine(r *rig) *machine {
	r.T.Helper()
	m := &machine{rig: r, root: filepath.Join(r.Dir, "root")}
	for _, dir := range []string{"dev", "proc", "tmp", "etc", "var/lib", "run", "mnt"} {
		m.mkdir("/"+dir, 0)
	}
	if err := os.WriteFile(m.at("/penstock"), nil, 0o755); err != nil {
		r.T.Fatal(err)
	}
	for _, line := range shipped(r.T, "penstock.tmpfiles.conf") {
		if d := strings.Fields(line); len(d) == 6 && d[0] == "d" {
			owner, known := map[string]int{"root": 0, "penstock": nobody}[d[3]]
			if !known || d[3] != d[4] {
				r.T.Fatalf("tmpfiles: %q", line)
			}
			m.mkdir(d[1], owner)
		}
	}
	return m
}

func (m *machine) at(path string) string { return filepath.Join(m.root, path) }

func (m *machine) mkdir(path string, owner int) {
	m.T.Helper()
	if err := os.MkdirAll(m.at(path), 0o755); err != nil {
		m.T.Fatal(err)
	}
	if err := os.Chown(m.at(path), owner, owner); err != nil {
		m.T.Fatal(err)
	}
}

// shipped are the lines of a file of deploy/systemd without comments.
func shipped(t testing.TB, name string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../deploy/systemd", name))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// start runs a unit with ProtectSystem=strict: everything is read-only to the unit except /dev,
// /proc, a /tmp of its own, its StateDirectory and its ReadWritePaths.
func (m *machine) start(unit string) *spawn.Process {
	t := m.T
	t.Helper()
	var args, writable []string
	strict, user := false, false
	for _, line := range shipped(t, unit+".service") {
		key, value, _ := strings.Cut(line, "=")
		switch key {
		case "ExecStart":
			args = strings.Fields(value)
		case "User":
			user = value == "penstock"
		case "ProtectSystem":
			strict = value == "strict"
		case "StateDirectory":
			m.mkdir("/var/lib/"+value, nobody)
			writable = append(writable, "/var/lib/"+value)
		case "ReadWritePaths":
			for _, path := range strings.Fields(value) {
				path, optional := strings.CutPrefix(path, "-")
				if _, err := os.Stat(m.at(path)); err != nil && optional {
					continue
				}
				writable = append(writable, path)
			}
		}
	}
	if !strict || !user || len(args) == 0 {
		t.Fatalf("%s is another unit than this test knows: %q", unit, args)
	}
	view := filepath.Join(m.Dir, unit)
	tmp := filepath.Join(m.Dir, unit+".tmp")
	for _, dir := range []string{view, tmp} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(tmp, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	bind := func(from, to string, flags uintptr) {
		t.Helper()
		if err := syscall.Mount(from, to, "", syscall.MS_BIND|flags, ""); err != nil {
			t.Fatalf("mount %s at %s: %v", from, to, err)
		}
	}
	bind(m.root, view, 0)
	t.Cleanup(func() { // behind the process's end, before the folder's
		if err := syscall.Unmount(view, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, path := range writable {
		bind(m.at(path), filepath.Join(view, path), 0)
	}
	bind("", view, syscall.MS_REMOUNT|syscall.MS_RDONLY)
	bind("/dev", filepath.Join(view, "dev"), 0)
	bind("/proc", filepath.Join(view, "proc"), 0)
	bind(tmp, filepath.Join(view, "tmp"), 0)
	bind(program.Path, filepath.Join(view, "penstock"), 0)

	cmd := exec.Command("/penstock", args[1:]...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid: true, Pdeathsig: syscall.SIGKILL, Chroot: view,
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody},
	}
	log, err := os.OpenFile(filepath.Join(m.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	p, err := spawn.Begin(cmd, unit, log, (*exec.Cmd).Start)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Kill(); log.Close() })
	return p
}

// write makes a configuration of an example in the manual.
func (m *machine) write(section, name string, replace *strings.Replacer) {
	m.T.Helper()
	var lines []string
	for _, line := range block(m.T, section, "# "+name) {
		if !strings.HasPrefix(line, "etcd-") { // this etcd has no certificates
			lines = append(lines, line)
		}
	}
	if err := os.WriteFile(m.at("/etc/penstock/"+name), []byte(replace.Replace(strings.Join(lines, "\n"))), 0o644); err != nil {
		m.T.Fatal(err)
	}
}

// TestInstall follows docs/operations.md on installing and mounting, and runs the servers as
// their units do. The servers serve, and renew their certificates: a unit that may not write to
// its credentials stops at the first renewal.
//
// The test takes as long as half the life of a certificate, nearly all of the time waiting: a
// shorter life might end on a busy machine before a server is asked for the renewal, and then no
// part can get in any more. (16 s did, at a load of 200.)
func TestInstall(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := &rig{Rig: program.NewRig(t)}
	m := newMachine(r)
	chunks := port.Free(t)
	r.Addr = port.Free(t)
	r.Env = append(r.Env, "PENSTOCK_CREDENTIALS="+m.at("/etc/penstock/credentials/admin"))
	if err := os.Mkdir(filepath.Join(r.Dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program.Path, filepath.Join(r.Dir, "bin", "penstock")); err != nil {
		t.Fatal(err)
	}
	members := etcd.Start(t, 0).Endpoints()

	// Files of servers name paths of the machine, commands name paths of the test.
	names := []string{
		"10.0.0.4:7400,10.0.0.5:7400", r.Addr,
		"10.0.0.4:7400, 10.0.0.5:7400", r.Addr,
		"10.0.0.4:7400", r.Addr,
		"10.0.0.7:7500", chunks,
		"https://10.0.0.1:2379, https://10.0.0.2:2379, https://10.0.0.3:2379", strings.Join(members, ", "),
		"https://10.0.0.1:2379,https://10.0.0.2:2379,https://10.0.0.3:2379", strings.Join(members, ","),
	}
	servers := strings.NewReplacer(names...)
	commands := append(names,
		"cluster init", "cluster init --certificate-life 40s",
		"--etcd-ca /etc/penstock/etcd-ca.pem --etcd-cert /etc/penstock/etcd.pem --etcd-key /etc/penstock/etcd.key ", "",
		"penstock: ", fmt.Sprintf("%d:%d ", nobody, nobody),
		"-o penstock", fmt.Sprint("-o ", nobody),
		"/etc/penstock", m.at("/etc/penstock"),
		"/mnt/results", m.at("/mnt/results"),
		"/mnt/nvme0", m.at("/mnt/nvme0"),
	)
	systemctl := func(verb, unit string) {
		t.Helper()
		if verb != "enable --now" {
			t.Fatalf("systemctl %s %s", verb, unit)
		}
		m.start(unit)
	}
	for _, name := range []string{"ca.pem", "client.pem", "client.key"} { // etcd's
		if err := os.WriteFile(filepath.Join(r.Dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	r.follow(block(t, "Install", "penstock cluster init"), systemctl, commands...)
	m.write("Install", "meta.yaml", servers)
	r.follow(block(t, "Install", "systemctl enable --now penstock-meta"), systemctl, commands...)
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })

	for _, disk := range []string{"/mnt/nvme0", "/mnt/nvme1", "/mnt/hdd0"} { // as mkfs leaves the disks
		m.mkdir(disk, 0)
	}
	own := block(t, "Install", "node7$ chown penstock: /mnt/nvme0")
	own = slices.DeleteFunc(own, func(line string) bool { return !strings.Contains(line, "$ chown") })
	r.follow(own, systemctl, commands...)
	for _, disk := range []string{"/mnt/nvme1", "/mnt/hdd0"} {
		r.follow(own, systemctl, append([]string{"/mnt/nvme0", m.at(disk)}, commands...)...)
	}
	m.write("Install", "chunkserver.yaml", servers)
	r.follow(block(t, "Install", "admin$ penstock cluster join-token --role chunkserver"), systemctl, commands...)
	r.Until("the disks are there", func() error {
		out, err := r.Ctl("disk", "list", "-o", "json")
		if err == nil && bytes.Count(out, []byte(`"ok"`)) != 3 {
			err = fmt.Errorf("%s", out)
		}
		return err
	})

	// This machine has one chunk server, not three in three racks.
	r.Must("volume", "create", "results", "--attach", "/results")
	at := m.at("/mnt/results")
	t.Cleanup(func() { spawn.Unmount(at) })
	r.follow(block(t, "Mount it", "admin$ penstock cluster join-token --role client"), systemctl, commands...)
	if err := os.WriteFile(filepath.Join(at, "f"), []byte("written"), 0o644); err != nil {
		t.Error(err)
	}

	// Each bearer's present key must be replaced by another.
	was := map[string][]byte{}
	for _, name := range []string{"meta", "chunkserver", "client"} {
		was[name] = identity(t, m.at("/etc/penstock/credentials/"+name))
	}
	for name := range was {
		r.Until("the certificate of "+name+" is renewed", func() error {
			if bytes.Equal(identity(t, m.at("/etc/penstock/credentials/"+name)), was[name]) {
				return errors.New("it is what it was")
			}
			return nil
		})
	}
	// The client's certificate is good, and all three servers serve. (No call renews the
	// administrator's certificate meanwhile: that certificate may have ended.)
	if err := os.WriteFile(filepath.Join(at, "g"), bytes.Repeat([]byte("more"), 100_000), 0o644); err != nil {
		t.Error(err)
	}
	if d, err := os.Open(at); err != nil || errors.Join(d.Sync(), d.Close()) != nil {
		t.Errorf("sync: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(at, "f")); err != nil || string(b) != "written" {
		t.Errorf("DATA: %q %v", b, err)
	}
}

// identity reads the key and certificate in a directory of credentials.
func identity(t *testing.T, dir string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "identity.pem"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
