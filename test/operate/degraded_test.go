package operate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// shown is the part of `penstock volume show` that the test reads.
type shown struct {
	Min  uint32 `json:"min_replicas"`
	Data struct {
		Open   uint64 `json:"open"`
		Short  uint64 `json:"short"`
		Bytes  uint64 `json:"short_bytes"`
		Placed bool   `json:"placed"`
	} `json:"data"`
}

func (r *rig) shown(volume string) (s shown, err error) {
	out, err := r.Ctl("volume", "show", volume, "-o", "json")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

// TestAnyNodeMayDie: of three hosts with three replicas, any one may be stopped, die or be
// drained. After a pause programs go on writing and syncing, and health, volume show and locate
// tell which copies are missing. Once the host is back all chunks get their full number of
// replicas again, although every program has its files open and does nothing more.
func TestAnyNodeMayDie(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := newRig(t, 3, "--repair-delay", "1s", "--repair-grace", "200ms", "--repair-interval", "200ms", "--balance", "-1")
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "3")
	at := r.mount("v:/", "w")
	log, err := os.Create(filepath.Join(at, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	var logged []byte
	want := map[string][]byte{}
	// None of the data is inline: a small file of its own, an append to a log.
	write := func(when string) {
		t.Helper()
		began := time.Now()
		name := strings.ReplaceAll(when, " ", "-")
		done := make(chan error, 1)
		go func() {
			data := bytes.Repeat([]byte(when+"\n"), 3000)
			want[name] = data
			f, err := os.Create(filepath.Join(at, name))
			if err == nil {
				_, err = f.Write(data)
				err = errors.Join(err, f.Sync(), f.Close())
			}
			logged = append(logged, data...)
			_, lerr := log.Write(data)
			done <- errors.Join(err, lerr, log.Sync())
		}()
		select {
		case err := <-done:
			if err != nil {
				t.Fatalf("%s: %v", when, err)
			}
		case <-time.After(90 * time.Second):
			t.Fatalf("%s: a sync does not return", when)
		}
		t.Logf("%5.1f s  written and synced %s", time.Since(began).Seconds(), when)
	}
	whole := func(when string) {
		t.Helper()
		began := time.Now()
		r.Until("all is at full number "+when, func() error {
			s, err := r.shown("v")
			if err != nil || s.Data.Short > 0 || !s.Data.Placed || s.Min != 2 {
				return fmt.Errorf("%+v %w", s, err)
			}
			return nil
		})
		t.Logf("%5.1f s  at full number %s", time.Since(began).Seconds(), when)
	}
	write("before")
	whole("before")

	if err := r.chunks[0].Pause(); err != nil {
		t.Fatal(err)
	}
	write("while one is stopped")
	if s, err := r.shown("v"); err != nil || s.Data.Short == 0 || s.Data.Bytes == 0 {
		t.Errorf("volume show says nothing of what is short: %+v %v", s, err)
	}
	r.chunks[0].Kill()
	r.chunks[0] = r.chunkServer(0)
	whole("after the stop")

	r.chunks[1].Kill()
	write("while one is dead")
	r.tells("one of three is dead", "warning", "warning node 2 ", "warning chunks : ", "?warning chunks : ")
	if out := string(r.Must("locate", filepath.Join(at, "while-one-is-dead"))); !strings.Contains(out, "2 of 3 replicas") {
		t.Errorf("locate says nothing of what is short:\n%s", out)
	}
	r.chunks[1] = r.chunkServer(1)
	whole("after the death")

	_, err = r.Ctl("node", "drain", "3")
	if err == nil || !strings.Contains(err.Error(), "volume v: DEGRADED") || !strings.Contains(err.Error(), "give --yes") {
		t.Errorf("a drain that leaves two servers for three replicas began without a question: %v", err)
	}
	r.Must("node", "drain", "3", "--yes")
	write("while one is drained")
	r.Must("node", "drain", "3", "--cancel")
	whole("after the drain")
	r.tells("all is well", "ok")

	// Two servers have all remaining replicas.
	r.chunks[2].Kill()
	want["log"] = logged
	for name, data := range want {
		b, err := os.ReadFile(filepath.Join(r.mount("v:/", "r-"+name), name))
		if err != nil || !bytes.Equal(b, data) {
			t.Errorf("DATA: %s: %d bytes, %v; want %d that differ", name, len(b), err, len(data))
		}
	}
}
