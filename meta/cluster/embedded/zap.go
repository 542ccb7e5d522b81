package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"go.uber.org/zap/zapcore"
)

// bridge hands etcd's log to slog: warnings and errors only.
type bridge struct {
	log    *slog.Logger
	dir    string
	fields []zapcore.Field
}

// usual are warnings that say nothing here: etcd minds a plain socket, which is
// what a member alone has.
var usual = map[string]bool{
	"serving client traffic insecurely; this is strongly discouraged!": true,
}

func (b *bridge) Enabled(l zapcore.Level) bool { return l >= zapcore.WarnLevel }

func (b *bridge) With(f []zapcore.Field) zapcore.Core {
	return &bridge{b.log, b.dir, append(b.fields[:len(b.fields):len(b.fields)], f...)}
}

func (b *bridge) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if b.Enabled(e.Level) && !usual[e.Message] {
		return c.AddCore(e, b)
	}
	return c
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
		b.log.Error("etcd gives up: see whether the disk of its folder is full, read-only or has errors, and start again; what was acknowledged is on the disk", "dir", b.dir, "cause", e.Message)
	}
	return nil
}

func (b *bridge) Sync() error { return nil }

// fatalHook is what happens after etcd wrote a fatal word to its log. While it opens its
// files that is an error of the start, which catch makes of the panic; later it ends the
// process, as etcd means it to.
type fatalHook struct{ opening atomic.Bool }

func (h *fatalHook) OnWrite(e *zapcore.CheckedEntry, f []zapcore.Field) {
	if h.opening.Load() {
		panic(e.Message)
	}
	os.Exit(1)
}
