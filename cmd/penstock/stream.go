package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// defaultKafka is where 'penstock up' serves streams to Kafka clients.
const defaultKafka = "127.0.0.1:9092"

// defaultIngest is where 'penstock up' takes records over HTTP.
const defaultIngest = "127.0.0.1:9094"

func newStream() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stream",
		Short: "Make, list, show, change and delete streams, append and read records, show consumer groups",
		Long: `A stream is a directory of the tree. Kafka clients append records to the stream and
read its records, which lie in ordinary files below the directory. Kafka clients know
the stream /volume/clicks as the topic volume.clicks. A gateway serves the streams;
'penstock up' contains a gateway.`,
	}
	cmd.AddCommand(newStreamCreate(), newStreamList(), newStreamShow(), newStreamSet(), newStreamDelete(), newStreamProduce(), newStreamConsume(), newStreamGroups(), newStreamResetGroup(), newStreamDeleteGroup(), newStreamPassword())
	return cmd
}

// onTree runs work with the tree below the root.
func (w *where) onTree(ctx context.Context, work func(t *penstock.Tree) error) error {
	c, err := w.connect(ctx)
	if err != nil {
		return err
	}
	v, err := c.VolumeByID(ctx, meta.RootVolume)
	if err == nil {
		err = work(v.Tree())
	}
	err = w.advise(err, false)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return errors.Join(err, c.Close(end))
}

// streamPath parses the argument that names a stream: a path, or the name of its topic.
func streamPath(arg string) (string, error) {
	if strings.HasPrefix(arg, "/") {
		return path.Clean(arg), nil
	}
	p, err := stream.Path(arg)
	if err != nil {
		return "", usagef("%s is neither the path of a stream, such as /volume/clicks, nor a topic, such as volume.clicks", printable(arg))
	}
	return p, nil
}

// Words of --cleanup.
const (
	cleanupDelete  = "delete"
	cleanupCompact = "compact"
)

// streamView is what the commands print of a stream.
type streamView struct {
	Path           string `json:"path" yaml:"path"`
	Topic          string `json:"topic" yaml:"topic"`
	Partitions     int    `json:"partitions" yaml:"partitions"`
	Format         string `json:"format" yaml:"format"`
	Retention      string `json:"retention,omitempty" yaml:"retention,omitempty"`
	RetentionBytes int64  `json:"retention_bytes,omitempty" yaml:"retention_bytes,omitempty"`
	Cleanup        string `json:"cleanup,omitempty" yaml:"cleanup,omitempty"`
	MaxBatch       int    `json:"max_message_bytes,omitempty" yaml:"max_message_bytes,omitempty"`
	Lag            string `json:"lag,omitempty" yaml:"lag,omitempty"`
	Schema         string `json:"schema,omitempty" yaml:"schema,omitempty"`
	Bytes          uint64 `json:"bytes" yaml:"bytes"`
	Files          int    `json:"files" yaml:"files"`
}

// viewStream describes a stream.
func viewStream(ctx context.Context, t *penstock.Tree, p string) (v streamView, err error) {
	s, err := stream.Load(ctx, t, p)
	if err != nil {
		return v, err
	}
	v = streamView{Path: p, Partitions: s.Partitions, Format: s.Format, RetentionBytes: s.RetentionBytes, MaxBatch: s.MaxBatch, Schema: s.Schema}
	if s.Compact {
		v.Cleanup = cleanupCompact
	}
	if s.Lag > 0 {
		v.Lag = s.Lag.String()
	}
	if v.Topic, err = stream.Topic(p); err != nil {
		v.Topic = "" // the path is too long for a topic
	}
	if s.Retention > 0 {
		v.Retention = s.Retention.String()
	}
	v.Files, v.Bytes, err = stream.Usage(ctx, t, p)
	return v, err
}

func showStream(t *table, v *streamView) {
	t.row("path", v.Path)
	t.row("topic", v.Topic)
	t.row("partitions", v.Partitions)
	t.row("format", v.Format)
	retention := v.Retention
	if retention == "" {
		retention = "for ever"
	}
	t.row("retention", retention)
	if v.RetentionBytes > 0 {
		t.row("retention bytes", bytesText(uint64(v.RetentionBytes)))
	}
	if v.MaxBatch > 0 {
		t.row("largest batch", bytesText(uint64(v.MaxBatch)))
	}
	if v.Cleanup != "" {
		t.row("cleanup", "the last record of each key is kept")
	}
	if v.Lag != "" {
		t.row("table", "published within "+v.Lag)
	}
	if v.Schema != "" {
		t.row("schema", v.Schema)
	}
	t.row("stored", fmt.Sprintf("%s in %d files", bytesText(v.Bytes), v.Files))
}

func newStreamCreate() *cobra.Command {
	var w where
	var out output
	var retention, lag span
	var most, segment sizeFlag
	var tableless bool
	var cleanup string
	spec := stream.Spec{Partitions: 1}
	cmd := &cobra.Command{
		Use:   "create PATH",
		Short: "Make a stream",
		Long: `Makes the directory PATH a stream, and missing parent directories. The records of a
partition have an order; the consumers of a group share the partitions. 'penstock stream
set' gives a stream more partitions later.

The gateway also publishes the records as a table: Parquet files with a Delta log, which any
program that reads Delta tables opens at PATH. --format says how the table shows the values;
the log keeps the bytes as the producers sent them. --schema makes fields of JSON values columns; types are
string, integer, long, float, double, boolean, binary (base64), timestamp (RFC 3339) and
array<...> of these. Values that do not fit go to PATH/rejected.`,
		Example: `  penstock stream create /v/clicks --partitions 4
  penstock stream create /logs/train --retention 7d --format json
  penstock stream create /v/labels --format json --schema "image:string,label:long,box:array<double>"`,
		Args: cobra.MatchAll(cobra.ExactArgs(1), func(_ *cobra.Command, args []string) error { return treePath(args[0]) }),
		RunE: func(cmd *cobra.Command, args []string) error {
			p := path.Clean(args[0])
			spec.Retention, spec.RetentionBytes, spec.SegmentBytes = time.Duration(retention), int64(most), int64(segment)
			if spec.Lag = time.Duration(lag); tableless {
				spec.Lag = 0
			} else if lag == 0 {
				spec.Lag = stream.DefaultLag
			}
			if err := setCleanup(&spec, cleanup); err != nil {
				return err
			}
			if err := spec.Check(); err != nil {
				return &usageError{err}
			}
			return w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				if err := stream.Create(cmd.Context(), t, p, spec); err != nil {
					return err
				}
				v, err := viewStream(cmd.Context(), t, p)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), v, func(t *table) { showStream(t, &v) })
			})
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	f := cmd.Flags()
	f.IntVar(&spec.Partitions, "partitions", 1, fmt.Sprintf("number of partitions, up to %d", stream.MaxPartitions))
	f.Var(&retention, "retention", "how long records are kept, such as 7d; old records are removed file by file")
	f.Var(&most, "retention-bytes", "largest size of a partition: the oldest records beyond it are removed")
	f.StringVar(&cleanup, "cleanup", cleanupDelete, "delete: only --retention removes records; compact: of each key, records before the last one are removed, too")
	f.Var(&segment, "segment-bytes", "largest size of a partition's file, after which the next file begins (default 64 MiB)")
	f.StringVar(&spec.Format, "format", stream.Formats[0], "what the values of the records are: "+strings.Join(stream.Formats, ", "))
	f.StringVar(&spec.Schema, "schema", "", "fields of JSON values that become columns of the table: name:type,name:type")
	f.Var(&lag, "lag", "longest time from a record's append until the table has the record")
	f.BoolVar(&tableless, "no-table", false, "publish no table")
	f.Lookup("retention").DefValue, f.Lookup("lag").DefValue = "for ever", "10s"
	cmd.MarkFlagsMutuallyExclusive("lag", "no-table")
	return cmd
}

func newStreamList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the streams of the tree",
		Long: `Lists the streams of the tree, after a walk over its directories, eight directories
deep. In a tree with very many directories the walk ends early, and the command says so.`,
		Example: `  penstock stream list`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			views := []streamView{}
			whole := true
			err := w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				var paths []string
				var err error
				if paths, whole, err = stream.List(cmd.Context(), t); err != nil {
					return err
				}
				for _, p := range paths {
					v, err := viewStream(cmd.Context(), t, p)
					if errors.Is(err, meta.NotFound) {
						continue // it was deleted meanwhile
					}
					if err != nil {
						return err
					}
					views = append(views, v)
				}
				return nil
			})
			if err != nil {
				return err
			}
			if !whole {
				cmd.PrintErrln("Not all directories were searched: the tree has too many, or they lie too deep.")
			}
			return out.print(cmd.OutOrStdout(), views, func(t *table) {
				t.row("PATH", "TOPIC", "PARTITIONS", "FORMAT", "STORED")
				for _, v := range views {
					t.row(v.Path, v.Topic, v.Partitions, v.Format, bytesText(v.Bytes))
				}
			})
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	return cmd
}

func newStreamShow() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "show STREAM",
		Short:   "Show a stream, by path or topic",
		Example: `  penstock stream show /v/clicks`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := streamPath(args[0])
			if err != nil {
				return err
			}
			return w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				v, err := viewStream(cmd.Context(), t, p)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), v, func(t *table) { showStream(t, &v) })
			})
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	return cmd
}

func newStreamDelete() *cobra.Command {
	var w where
	var yes bool
	var cmd *cobra.Command
	cmd = &cobra.Command{
		Use:     "delete STREAM",
		Short:   "Delete a stream with all its records",
		Example: `  penstock stream delete /v/clicks --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			p, err := streamPath(args[0])
			if err != nil {
				return err
			}
			return w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				v, err := viewStream(cmd.Context(), t, p)
				if err != nil {
					return err
				}
				if !yes {
					if err := confirm(cmd, fmt.Sprintf("Delete stream %s (%s) for ever?", p, bytesText(v.Bytes)), p); err != nil {
						return err
					}
				}
				return stream.Delete(cmd.Context(), t, p)
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	return cmd
}
