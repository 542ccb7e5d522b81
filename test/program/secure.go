package program

import (
	"os"
	"os/exec"
	"path/filepath"

	"penstock.io/penstock/test/port"
)

// Secure makes the state of a cluster with certificates, over TCP, in DIR/m. From then on
// commands run as its administrator. The caller starts the metadata server with
// Credentials("meta").
func (r *Rig) Secure() {
	r.T.Helper()
	r.Addr = port.Free(r.T)
	r.Env = append(r.Env, "PENSTOCK_CREDENTIALS="+r.Credentials("admin"))
	init := exec.Command(Path, "cluster", "init", "--dir", filepath.Join(r.Dir, "m"), "--credentials", r.Credentials())
	if out, err := init.CombinedOutput(); err != nil {
		r.T.Fatalf("cluster init: %v: %s", err, out)
	}
}

// Credentials returns the directory of a name's credentials.
func (r *Rig) Credentials(name ...string) string {
	return filepath.Join(append([]string{r.Dir, "cred"}, name...)...)
}

// JoinToken makes a file with a join token for a role.
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
