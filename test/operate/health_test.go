package operate

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// judges are the commands that judge a cluster, all alike.
var judges = [][]string{{"health"}, {"cluster", "status", "--check"}}

// health asks one of judges for the cluster's health; the exit status must fit the printed
// status. health drops the fill of the machine's own disk, which holds the tests.
func (r *rig) health(judge []string) (status string, problems []string, err error) {
	cmd := exec.Command(program.Path, append(slices.Clone(judge), "--output", "json", "--cluster", r.Addr)...)
	cmd.Env = append(os.Environ(), r.Env...)
	out, err := cmd.Output()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		return "", nil, err
	}
	var h struct {
		Status   string
		Health   string // of cluster status
		Problems []struct{ Severity, Part, Object, Text, Next string }
	}
	if len(out) == 0 && judge[0] == "cluster" && cmd.ProcessState.ExitCode() == 2 { // no server is left to answer
		return "critical", []string{"critical metadata " + r.Addr + ": no metadata server answers"}, nil
	}
	if jerr := json.Unmarshal(out, &h); jerr != nil {
		return "", nil, fmt.Errorf("%w, exit %v: %s", jerr, err, out)
	}
	h.Status = cmp.Or(h.Status, h.Health)
	if want := map[string]int{"ok": 0, "warning": 1, "critical": 2}[h.Status]; cmd.ProcessState.ExitCode() != want {
		r.T.Errorf("exit status %d for %s", cmd.ProcessState.ExitCode(), out)
	}
	status = "ok"
	for _, p := range h.Problems {
		if p.Part == "space" || p.Part == "disk" && strings.HasSuffix(p.Text, " left") {
			continue
		}
		if status == "ok" {
			status = p.Severity // the worst come first
		}
		problems = append(problems, fmt.Sprintf("%s %s %s: %s; next: %s", p.Severity, p.Part, p.Object, p.Text, p.Next))
	}
	return status, problems, nil
}

// tells waits until the health has a status, and each problem begins with one of the given
// beginnings, each at least once, perhaps with "?" in front; all other problems are wrong.
func (r *rig) tells(what, status string, want ...string) {
	r.T.Helper()
	began := time.Now()
	defer func() { r.T.Logf("%5.1f s  %s", time.Since(began).Seconds(), what) }()
	for _, judge := range judges {
		r.told(judge, what, status, want)
	}
}

func (r *rig) told(judge []string, what, status string, want []string) {
	r.T.Helper()
	r.Until(what+", says "+strings.Join(judge, " "), func() error {
		got, problems, err := r.health(judge)
		if err != nil {
			return err
		}
		for _, w := range want {
			if !strings.HasPrefix(w, "?") && !strings.Contains("\n"+strings.Join(problems, "\n"), "\n"+w) {
				return fmt.Errorf("nothing of %q: %s %s", w, got, strings.Join(problems, "\n"))
			}
		}
		for _, p := range problems {
			known := false
			for _, w := range want {
				known = known || strings.HasPrefix(p, strings.TrimPrefix(w, "?"))
			}
			if !known {
				return fmt.Errorf("%s, which is not so", p)
			}
		}
		if got != status {
			return fmt.Errorf("it is %s, not %s: %s", got, status, strings.Join(problems, "\n"))
		}
		return nil
	})
}

// TestHealth breaks a cluster, one part after the other: `penstock health` tells each problem,
// and no longer tells the problem after the repair.
func TestHealth(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := newSecureRig(t, 3, nil, "--repair-delay", "1s", "--repair-grace", "200ms", "--repair-interval", "200ms")
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "2", "--spread", "rack", "--quota", "1M")
	r.Join("client", "lab")
	r.Must("grant", "add", "lab", "v", "--rights", "write")
	at, mount := r.mountBy("v:/", "w", "--credentials", r.Credentials("lab"))
	r.tells("all is well", "ok")

	// A metadata server that joined, and was never started.
	r.Join("meta", "m2")
	r.tells("a metadata server that does not run", "warning", "warning metadata m2: has joined")
	r.Must("cluster", "evict", "meta/m2")
	r.tells("it is gone for good", "ok")

	// A nearly exhausted quota.
	if err := os.WriteFile(filepath.Join(at, "f"), make([]byte, 1000<<10), 0o644); err != nil {
		t.Fatal(err)
	}
	r.tells("a volume near its quota", "warning", "warning quota v: has used 1000.0 KiB of 1.0 MiB")
	r.Must("volume", "set", "v", "--quota", "1G")
	r.tells("its quota was raised", "ok")

	// A killed mount, and another mount that takes its place.
	mount.Kill()
	r.tells("a mount that was killed", "warning", "warning client ")
	if err := spawn.Unmount(at); err != nil {
		t.Fatal(err)
	}
	r.mount("v:/", "w", "--credentials", r.Credentials("lab"))
	r.tells("it was mounted anew", "ok")

	// A disk that was given up.
	var disks []struct {
		ID   string
		Node uint64
	}
	if err := json.Unmarshal(r.Must("disk", "list", "-o", "json"), &disks); err != nil {
		t.Fatal(err)
	}
	for _, d := range disks {
		if d.Node == 3 {
			r.Must("disk", "fail", d.ID, "--yes")
		}
	}
	r.tells("a disk that is being emptied", "warning", "warning disk ", "?warning chunks : ")

	// Two of three chunk servers die: their chunks can't be repaired.
	for _, c := range r.chunks[:2] {
		c.Kill()
	}
	r.tells("two dead chunk servers", "critical", "warning disk ", "warning node 1 ", "warning node 2 ", "critical chunks : ", "?warning chunks : ")
	for i := range r.chunks[:2] {
		r.chunks[i] = r.chunkServer(i)
	}
	r.tells("they are back", "warning", "warning disk ", "?warning chunks : ")

	// Nobody answers.
	r.meta.Kill()
	r.tells("nobody answers", "critical", "critical metadata "+r.Addr+": no metadata server answers")
}
