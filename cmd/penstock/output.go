package main

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"gopkg.in/yaml.v3"
)

// output is the flag --output of a command that lists objects.
type output struct{ format string }

func (o *output) flag(cmd *cobra.Command) {
	o.format = "table"
	cmd.Flags().VarP(o, "output", "o", "format of the answer: table, json or yaml")
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag was added the line before
	}
}

// Set, String and Type make output a pflag.Value.
func (o *output) Set(s string) error {
	switch s {
	case "table", "json", "yaml":
		o.format = s
		return nil
	}
	return fmt.Errorf("%q is not table, json or yaml", s)
}

func (o *output) String() string { return o.format }

// Type names the value in help texts.
func (o *output) Type() string { return "format" }

// print writes v in the chosen format; fill draws the table.
// A list without elements is "[]", whether or not the slice is nil.
func (o *output) print(w io.Writer, v any, fill func(*table)) error {
	if list := reflect.ValueOf(v); list.Kind() == reflect.Slice && list.IsNil() {
		v = reflect.MakeSlice(list.Type(), 0, 0).Interface()
	}
	switch o.format {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "yaml":
		e := yaml.NewEncoder(w)
		e.SetIndent(2)
		if err := e.Encode(v); err != nil {
			return err
		}
		return e.Close()
	}
	t := &table{w: newTabs(w)}
	fill(t)
	return t.w.Flush()
}

func newTabs(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

// table draws aligned columns.
type table struct{ w *tabwriter.Writer }

func (t *table) row(cells ...any) {
	texts := make([]string, len(cells))
	for i, c := range cells {
		texts[i] = fmt.Sprint(c)
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(texts, "\t"), "\t "))
}

// bytesText renders a size for people, in binary units.
func bytesText(n uint64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, units := float64(n), "KMGTPE"
	for i := range len(units) {
		if f /= 1024; f < 1024 || i == len(units)-1 {
			return fmt.Sprintf("%.1f %ciB", f, units[i])
		}
	}
	panic("unreachable: the last unit returns")
}
