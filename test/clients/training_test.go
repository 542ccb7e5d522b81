package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// trainer runs deploy/examples/train_stream.py with Debian's Python.
func trainer(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "/usr/bin/python3", append([]string{"../../deploy/examples/train_stream.py"}, args...)...)
}

// result returns the JSON in the last line of a trainer's output.
func result[T any](t *testing.T, out []byte) (r T) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

// TestTraining: the training example trains from a stream while records arrive. The job is killed again
// and again, goes on from its checkpoint, and has then trained on each record once. An epoch over a
// snapshot reads each record once from the Parquet files of the table.
func TestTraining(t *testing.T) {
	mnt := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	s := startServer(t, "--mount", mnt)
	command := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(*program, append(args, "--dir", s.dir)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	command("volume", "create", "v", "--attach", "/v")
	command("stream", "create", "/v/samples", "--partitions", "4", "--format", "json", "--schema", "n:long,x:array<double>,y:double", "--lag", "1s")

	const samples, each = 2000, 20
	arrived := make(chan error, 1)
	go func() { // ends when all samples are in the stream, or with an error
		for first := 0; first < samples; first += each {
			var body bytes.Buffer
			for n := first; n < first+each; n++ {
				a := float64(n%17) / 17
				fmt.Fprintf(&body, `{"n":%d,"x":[%g,%g,1,0],"y":%g}`+"\n", n, a, a*a, 3*a-1)
			}
			at := fmt.Sprintf("http://%s/v1/append/v/samples?partition=%d", s.ingest, first/each%4)
			r, err := http.Post(at, "application/x-ndjson", &body)
			if err == nil && r.StatusCode != http.StatusOK {
				err = fmt.Errorf("status %s", r.Status)
			}
			if err != nil {
				arrived <- err
				return
			}
			r.Body.Close()
			time.Sleep(200 * time.Millisecond)
		}
		arrived <- nil
	}()

	checkpoint := filepath.Join(t.TempDir(), "model.pt")
	args := []string{"--brokers", s.addr, "--topic", "v.samples", "--checkpoint", checkpoint, "--every", "0.3", "--until", fmt.Sprint(samples)}
	// A job is killed some time after it has written a checkpoint, amid the work of its workers.
	kills := 0
	for arriving := true; arriving; {
		var out bytes.Buffer
		cmd := trainer(t.Context(), args...)
		cmd.Stdout, cmd.Stderr = &out, &out
		before, _ := os.Stat(checkpoint)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			now, err := os.Stat(checkpoint)
			if err == nil && (before == nil || !os.SameFile(before, now)) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the job writes no checkpoint: %s", out.Bytes())
			}
		}
		time.Sleep(time.Duration(100+kills*130) * time.Millisecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		kills++
		select {
		case err := <-arrived:
			if err != nil {
				t.Fatal(err)
			}
			arriving = false
		default:
		}
		if kills >= 8 {
			if err := <-arrived; err != nil {
				t.Fatal(err)
			}
			arriving = false
		}
	}
	out, err := trainer(t.Context(), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	r := result[struct {
		Trained, Before int
		Once            bool
	}](t, out)
	if r.Trained != samples || !r.Once {
		t.Errorf("DATA: after %d kills the model was trained %d times on %d records, on each once: %v", kills, r.Trained, samples, r.Once)
	}
	t.Logf("%d kills; the last job printed: %s", kills, out)

	// The epoch over a snapshot, when the table has all records.
	deadline := time.Now().Add(patience)
	for n := 0; ; n++ {
		name := fmt.Sprint("s", n)
		command("snapshot", "create", "v", name)
		out, err = trainer(t.Context(), "--checkpoint", checkpoint+"."+name, "--reader", "node scripts/rows.mjs", "--table", filepath.Join(mnt, "v/.snapshot", name, "samples")).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		e := result[struct {
			Rows int
			Once bool
		}](t, out)
		if e.Rows == samples && e.Once {
			break
		}
		if time.Now().After(deadline) || e.Rows > samples {
			t.Fatalf("DATA: the epoch had %d rows of %d records, each once: %v", e.Rows, samples, e.Once)
		}
		time.Sleep(time.Second)
	}
	t.Logf("an epoch over a snapshot printed: %s", out)
}
