package program

import (
	"os"
	"os/exec"
	"path/filepath"

	"penstock.io/penstock/test/port"
)

// Secure makes the state of a cluster whose parts know each other by certificates, over
// TCP, in DIR/m; commands are its administrator's from then on. The metadata server is
// started with Credentials("meta") by who calls it.
func (r *Rig) Secure() {
	r.T.Helper()
	r.Addr = port.Free(r.T)
	r.Env = append(r.Env, "PENSTOCK_CREDENTIALS="+r.Credentials("admin"))
	init := exec.Command(Path, "cluster", "init", "--dir", filepath.Join(r.Dir, "m"), "--credentials", r.Credentials())
	if out, err := init.CombinedOutput(); err != nil {
		r.T.Fatalf("cluster init: %v: %s", err, out)
	}
}

// Credentials is where those of a name lie.
func (r *Rig) Credentials(name ...string) string {
	return filepath.Join(append([]string{r.Dir, "cred"}, name...)...)
}

// JoinToken makes a file with a token by which one joins the cluster.
func (r *Rig) JoinToken(role string) string {
	r.T.Helper()
	file := filepath.Join(r.Dir, "token-"+role)
	if err := os.WriteFile(file, r.Must("cluster", "join-token", "--role", role), 0o600); err != nil {
		r.T.Fatal(err)
	}
	return file
}

// Join makes credentials for a name.
func (r *Rig) Join(role, name string) {
	r.T.Helper()
	r.Must("cluster", "join", "--name", name, "--credentials", r.Credentials(name), "--token-file", r.JoinToken(role))
}
