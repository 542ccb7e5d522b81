package formats

import (
	"bufio"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/program"
)

// oldTalk reads what a program of an older protocol sent, by connection.
func oldTalk(t *testing.T, name string) (talks [][]oldFrame) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(b), "\n\n") {
		var talk []oldFrame
		for line := range strings.Lines(part) {
			if strings.HasPrefix(line, "#") {
				continue
			}
			name, frame, _ := strings.Cut(strings.TrimSpace(line), " ")
			f, err := hex.DecodeString(frame)
			if err != nil {
				t.Fatal(err)
			}
			talk = append(talk, oldFrame{name, f})
		}
		talks = append(talks, talk)
	}
	return talks
}

type oldFrame struct {
	name  string
	bytes []byte
}

// answers that an old program waits for, and what it must find in them.
var oldAnswers = map[string]struct {
	m  wire.Message
	ok func(m wire.Message) bool
}{
	"hello":   {new(wire.Hello), func(m wire.Message) bool { h := m.(*wire.Hello); return h.Err == meta.KindOK && h.Min <= 2 }},
	"root":    {new(wire.AdminRe), func(m wire.Message) bool { return len(m.(*wire.AdminRe).Volumes) == 1 }},
	"enter":   {new(wire.Entered), func(m wire.Message) bool { return m.(*wire.Entered).Status.Err == meta.KindOK }},
	"create":  {new(wire.Reply), func(m wire.Message) bool { return m.(*wire.Reply).Result.Attr.Ino != 0 }},
	"setattr": {new(wire.Reply), func(m wire.Message) bool { return m.(*wire.Reply).Result.Attr.Mode&0o7777 == 0o711 }},
	"batch": {new(wire.BatchRe), func(m wire.Message) bool {
		r := m.(*wire.BatchRe).Replies
		return len(r) == 2 && r[0].Result.Attr.Ino != 0 && len(r[1].Result.Entries) > 0
	}},
	"alloc":  {new(wire.Grants), func(m wire.Message) bool { return len(m.(*wire.Grants).Grants) == 1 }},
	"caps":   {new(wire.CapsRe), func(m wire.Message) bool { return len(m.(*wire.CapsRe).Cap) > 0 }},
	"sync":   {new(wire.Reply), func(m wire.Message) bool { return m.(*wire.Reply).Status.Err == meta.KindOK }},
	"status": {new(wire.AdminRe), func(m wire.Message) bool { return len(m.(*wire.AdminRe).Report) > 0 }},
	"alive":  {new(wire.KeepAlive), func(m wire.Message) bool { return m.(*wire.KeepAlive).Count == 5 }},
	"bye":    {new(wire.Bye), func(wire.Message) bool { return true }},
	// A chunk server hears the keys, who there is, and that its events arrived.
	"report": {new(wire.Reported), func(m wire.Message) bool { return m.(*wire.Reported).Seq == 1 }},
}

var oldAnswerTypes = map[string]wire.Type{
	"hello": wire.THello, "root": wire.TAdminRe, "enter": wire.TEntered, "create": wire.TReply, "setattr": wire.TReply, "batch": wire.TBatchRe,
	"alloc": wire.TGrants, "caps": wire.TCapsRe, "sync": wire.TReply, "status": wire.TAdminRe, "alive": wire.TKeepAlive, "bye": wire.TBye,
	"report": wire.TReported,
}

// A mount and a chunk server of the version before work with the servers of
// this one: byte for byte what they sent, and every frame that they hear is in
// the form that they know (meta/wire makes sure of the form).
func TestClientsOfTheVersionBefore(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "pf-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p, err := spawn.Start(t.Context(), spawn.Config{Binary: program.Path, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Kill() })
	for _, talk := range oldTalk(t, "session-v2") {
		nc := dialUp(t, filepath.Join(dir, "meta.sock"))
		r := bufio.NewReader(nc)
		rd := wire.NewReader(r)
		rd.Trust()
		for _, f := range talk {
			if _, err := nc.Write(f.bytes); err != nil {
				t.Fatalf("%s: %v", f.name, err)
			}
			for {
				typ, _, body, err := rd.Next()
				if err != nil {
					t.Fatalf("%s: %v", f.name, err)
				}
				if body.Version != 2 {
					t.Fatalf("%s: a frame of type %d in version %d", f.name, typ, body.Version)
				}
				if typ != oldAnswerTypes[f.name] {
					continue // told unasked: lists of servers, what is durable
				}
				a := oldAnswers[f.name]
				if err := wire.Decode(body, a.m); err != nil || !a.ok(a.m) {
					t.Fatalf("%s: %v, %+v", f.name, err, a.m)
				}
				break
			}
		}
	}
}

// dialUp connects as soon as somebody answers.
func dialUp(t *testing.T, path string) net.Conn {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		nc, err := net.Dial("unix", path)
		if err == nil {
			t.Cleanup(func() { nc.Close() }) // not before: the client needs a chunk server
			nc.SetDeadline(time.Now().Add(time.Minute))
			return nc
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}
