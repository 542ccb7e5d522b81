package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap/zapcore"
)

// bridge hands etcd's log to slog: warnings and errors only.
type bridge struct {
	log    *slog.Logger
	dir    string
	life   *life
	fields []zapcore.Field
}

// life says in which part of its life a server is.
type life struct {
	// newUntil: the server makes its files, and their first records, until about then; zero: the
	// server found files.
	newUntil time.Time
	closing  atomic.Bool // Close has begun
}

// firstRecords bounds the time in which a new server's first records follow its files.
const firstRecords = 10 * time.Second

// usual are warnings without meaning here: only this user reaches the plain socket of the single
// member, and tokens of etcd's own users are not in use.
var usual = map[string]bool{
	"Running http and grpc server on single port. This is not recommended for production.": true,
	"simple token is not cryptographically signed":                                         true,
	"serving client traffic insecurely; this is strongly discouraged!":                     true,
}

// first are messages about records that a new server has not written yet. etcd looks for the
// records again some seconds later.
var first = map[string]bool{
	"Failed to detect schema version":  true,
	"failed to update storage version": true,
}

// ends are messages about the end of a listener. etcd logs them also when it closes the listener
// itself, because it stops.
var ends = map[string]bool{
	"setting up serving from embedded etcd failed.": true,
	"stopping insecure grpc server due to error":    true,
	"stopped insecure grpc server due to error":     true,
}

func (b *bridge) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

func (b *bridge) With(f []zapcore.Field) zapcore.Core {
	return &bridge{b.log, b.dir, b.life, append(b.fields[:len(b.fields):len(b.fields)], f...)}
}

func (b *bridge) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if b.Enabled(e.Level) && !b.life.inOrder(e) {
		return c.AddCore(e, b)
	}
	return c
}

// inOrder reports whether a message says only that the server begins or ends in order.
func (l *life) inOrder(e zapcore.Entry) bool {
	switch {
	case usual[e.Message]:
		return true
	case first[e.Message], strings.Contains(e.Message, "cannot campaign at term 1 "):
		return e.Time.Before(l.newUntil)
	}
	return ends[e.Message] && l.closing.Load()
}

func (b *bridge) Write(e zapcore.Entry, f []zapcore.Field) error {
	level := slog.LevelWarn
	if e.Level >= zapcore.ErrorLevel {
		level = slog.LevelError
	}
	enc := zapcore.NewMapObjectEncoder()
	for _, x := range b.fields {
		x.AddTo(enc)
	}
	for _, x := range f {
		x.AddTo(enc)
	}
	b.log.Log(context.Background(), level, "etcd: "+e.Message, "etcd", fmt.Sprint(enc.Fields))
	if e.Level >= zapcore.DPanicLevel {
		b.log.Error("etcd gives up: see whether the disk of its folder is full, read-only or has errors, and start again; what was acknowledged is on the disk. If its files are damaged: docs/operations.md, \"etcd's files in a data directory\"", "dir", b.dir, "cause", e.Message)
	}
	return nil
}

func (b *bridge) Sync() error { return nil }

// endings decides what follows a fatal or panicking log message. While etcd opens its files,
// such a message becomes an error of the start, in every goroutine. Later such a message ends
// the process, as etcd intends.
type endings struct {
	opening atomic.Bool
	cause   chan string // of the first such message during the opening; buffers one
}

// zap calls fatal after a fatal message, panics after a panicking message.
type (
	fatal  struct{ *endings }
	panics struct{ *endings }
)

func (h fatal) OnWrite(e *zapcore.CheckedEntry, f []zapcore.Field) {
	h.whileOpening(e, f)
	os.Exit(1)
}

func (h panics) OnWrite(e *zapcore.CheckedEntry, f []zapcore.Field) {
	h.whileOpening(e, f)
	panic(e.Message)
}

// whileOpening ends the goroutine if etcd is opening its files.
func (h *endings) whileOpening(e *zapcore.CheckedEntry, f []zapcore.Field) {
	if !h.opening.Load() {
		return
	}
	cause := e.Message
	for _, x := range f {
		if err, ok := x.Interface.(error); ok {
			cause += ": " + err.Error()
		}
	}
	select {
	case h.cause <- cause:
	default:
	}
	runtime.Goexit()
}
