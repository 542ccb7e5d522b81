package streams

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/test/program"
)

// TestLogin: with a file of users, kcat (librdkafka) produces and consumes with each mechanism and
// the password, and nothing without.
func TestLogin(t *testing.T) {
	users := filepath.Join(t.TempDir(), "users.json")
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `echo secret | "$0" stream password ann --file "$1"`, program.Path, users)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	m := newMachine(t, "--stream-users", users, "--ingest", "")
	m.Must("stream", "create", "/v/t")
	as := func(mechanism, password string) []string {
		return []string{"-X", "security.protocol=SASL_PLAINTEXT", "-X", "sasl.mechanisms=" + mechanism, "-X", "sasl.username=ann", "-X", "sasl.password=" + password}
	}
	all := []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"}
	for _, mechanism := range all {
		m.kcat("1\n", append(as(mechanism, "secret"), "-P", "-t", "v.t")...)
	}
	if got := m.kcat("", append(as("PLAIN", "secret"), "-C", "-t", "v.t", "-o", "beginning", "-e")...); strings.Count(got, "1\n") != len(all) {
		t.Errorf("DATA: %q", got)
	}
	for name, args := range map[string][]string{"no login": nil, "a wrong password": as("SCRAM-SHA-256", "other")} {
		args = slices.Concat([]string{"-b", m.kafka, "-L", "-m", "3"}, args)
		if out, err := exec.CommandContext(t.Context(), "kcat", args...).CombinedOutput(); err == nil {
			t.Errorf("%s: kcat got %s", name, out)
		}
	}
}
