package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// logFlags holds the flags of a role with a log.
type logFlags struct{ level string }

func (l *logFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.level, "log-level", "info", "least level that is logged: debug, info, warn or error")
}

// logger writes text to a terminal, JSON to anything else.
func (l *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, usagef("--log-level %q is not debug, info, warn or error", l.level)
	}
	opts := &slog.HandlerOptions{Level: level}
	if isTerminal(w) {
		return slog.New(slog.NewTextHandler(w, opts)), nil
	}
	return slog.New(slog.NewJSONHandler(w, opts)), nil
}

// started logs the line with which a role reports that it serves.
func started(log *slog.Logger, role string, attrs ...any) {
	log.Info(fmt.Sprintf("penstock %s serves", role), append([]any{"version", version, "role", role, "pid", os.Getpid()}, attrs...)...)
}

// isTerminal reports whether w (or r) is a terminal.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
