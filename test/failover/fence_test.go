package failover

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
)

// maker is a client in a process of its own: the client makes files without a pause until the
// kill, and writes each acknowledged name into a file.
type maker struct {
	Addrs  []string
	Volume meta.VolumeID
	File   string
}

// Run is of child.Role.
func (k maker) Run() error {
	f, err := os.Create(k.File)
	if err != nil {
		return err
	}
	s, err := client.Dial(context.Background(), client.Config{Addrs: k.Addrs, Name: "maker", Creds: peer.Insecure()})
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		name := fmt.Sprint("made-", i)
		_, err := s.Do(context.Background(), k.Volume, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseNone)
		if err == nil {
			_, err = fmt.Fprintln(f, name)
		}
		if err != nil {
			return err
		}
		if i == 0 {
			child.Ready("")
		}
	}
}

// An owner stands still with an entry on its way to etcd. The owner is deposed; then the entry
// arrives, while the next owner has not yet written an entry of the same number, since the next
// owner waits for a client that does not come back. The entry must not get into the journal,
// neither then nor when the first owner wakes up and goes on with the entry: the next owner has
// read to the end.
func TestLateCommit(t *testing.T) {
	s := start(t, 2)
	admin, err := s.dial(t.Context(), "admin", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(t.Context())
	vols, err := s.volumes(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	v := vols[0]
	file := filepath.Join(s.dir, "made")
	k := child.Start(t, maker{s.addrs(), v, file})
	until(t, "the volume is at home", func() bool { return s.owner(v) != nil && s.owner(v) == s.home(v) })

	old := s.home(v)
	until(t, "an entry is on its way", func() bool {
		old.gate.cut()
		for range 50 {
			// A renewal of the lease alone is smaller.
			if time.Sleep(10 * time.Millisecond); old.gate.holds() > 250 {
				return true
			}
		}
		old.gate.heal() // the answer to the entry before was held back
		time.Sleep(50 * time.Millisecond)
		return false
	})
	if err := k.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := old.p.Pause(); err != nil {
		t.Fatal(err)
	}
	until(t, "another server owns the volume", func() bool { o := s.owner(v); return o != nil && o != old })
	rec, _, err := s.owners.Last(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	before := s.entries(t, v)
	old.gate.heal()
	time.Sleep(time.Second)
	if err := old.p.Resume(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	after := s.entries(t, v)
	t.Logf("the journal had %d entries when term %d began, has %d", len(before), rec.Term, len(after))
	for i, e := range before {
		if i >= len(after) || after[i].Seq != e.Seq || after[i].Term != e.Term || after[i].Hash != e.Hash {
			t.Errorf("DATA: entry %d of term %d is not what it was", e.Seq, e.Term)
		}
	}
	for _, e := range after[min(len(before), len(after)):] {
		if e.Term < rec.Term {
			t.Errorf("DATA: entry %d is of term %d, but the owner of term %d had read to entry %d", e.Seq, e.Term, rec.Term, len(before))
		}
	}

	// Each existing file was acknowledged, or is the last requested file.
	k.Kill()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Fields(string(b))
	asked := append(slices.Clone(names), fmt.Sprint("made-", len(names)))
	listed, err := list(t.Context(), admin, v)
	if err != nil {
		t.Fatal(err)
	}
	for name := range listed {
		if strings.HasPrefix(name, "made-") && !slices.Contains(asked, name) {
			t.Errorf("DATA: %s is there, which nobody made", name)
		}
	}
}

// entries reads a volume's journal.
func (s *site) entries(t *testing.T, v meta.VolumeID) (all []journal.Entry) {
	t.Helper()
	err := etcd.ReadLog(s.etcd.Client(), "/penstock/default", v, nil).Read(t.Context(), journal.Position{}, func(e journal.Entry) error {
		all = append(all, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// until waits for a required event.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within three minutes: %s", what)
		}
	}
}
