package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"gopkg.in/yaml.v3"
)

// Configuration. A role reads a YAML file, a flat map from the names of its flags to values:
//
//	dir: /var/lib/penstock
//	mount: /mnt/penstock
//	log-level: warn
//
// A flag on the command line wins over the environment (PENSTOCK_LOG_LEVEL for log-level), and
// the environment wins over the file. A key without a flag of the role is an error, so that a
// typing mistake does not silently select a default.

// defaultConfigDir is the directory of ROLE.yaml without --config.
const defaultConfigDir = "/etc/penstock"

// configurable lets a command be configured by file and environment too.
func configurable(cmd *cobra.Command) *cobra.Command {
	var file string
	cmd.Flags().StringVar(&file, "config", "", fmt.Sprintf("configuration file (default %s if it exists)", filepath.Join(defaultConfigDir, cmd.Name()+".yaml")))
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := applyEnvironment(cmd, os.LookupEnv); err != nil {
			return err
		}
		return applyFile(cmd, file)
	}
	return cmd
}

// notConfig are flags about the command line itself.
var notConfig = []string{"config", "help"}

func envName(flag string) string {
	return "PENSTOCK_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func applyEnvironment(cmd *cobra.Command, lookup func(string) (string, bool)) error {
	var errs []error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Changed || slices.Contains(notConfig, f.Name) {
			return
		}
		if v, ok := lookup(envName(f.Name)); ok {
			if err := cmd.Flags().Set(f.Name, v); err != nil {
				errs = append(errs, usagef("environment variable %s: %w", envName(f.Name), err))
			}
		}
	})
	return errors.Join(errs...)
}

func applyFile(cmd *cobra.Command, file string) error {
	if file == "" {
		file = filepath.Join(defaultConfigDir, cmd.Name()+".yaml")
		if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	settings, err := readConfig(file)
	if err != nil {
		return err
	}
	for _, s := range settings {
		f := cmd.Flags().Lookup(s.key)
		if f == nil || slices.Contains(notConfig, s.key) {
			return usagef("%s:%d: unknown key %q; 'penstock %s' knows: %s", file, s.line, s.key, cmd.Name(), strings.Join(configKeys(cmd), ", "))
		}
		if f.Changed {
			continue // set by the command line or the environment
		}
		if err := cmd.Flags().Set(s.key, s.value); err != nil {
			return usagef("%s:%d: %s: %w", file, s.line, s.key, err)
		}
	}
	return nil
}

func configKeys(cmd *cobra.Command) []string {
	var keys []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(notConfig, f.Name) {
			keys = append(keys, f.Name)
		}
	})
	return keys
}

// setting is a key of a configuration file with its value and line.
type setting struct {
	key, value string
	line       int
}

// readConfig parses a file into its settings, in order. Values are scalars or lists of
// scalars.
func readConfig(file string) ([]setting, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, usagef("configuration: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return nil, usagef("%s: %w", file, err)
	}
	if len(doc.Content) == 0 {
		return nil, nil // empty
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return nil, usagef("%s:%d: expected 'key: value' lines", file, root.Line)
	}
	var settings []setting
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		s := setting{key: key.Value, line: key.Line}
		if slices.ContainsFunc(settings, func(t setting) bool { return t.key == s.key }) {
			return nil, usagef("%s:%d: key %q stands twice", file, s.line, s.key)
		}
		switch value.Kind {
		case yaml.ScalarNode:
			s.value = value.Value
		case yaml.SequenceNode:
			var items []string
			for _, item := range value.Content {
				if item.Kind != yaml.ScalarNode {
					return nil, usagef("%s:%d: %s: expected a list of plain values", file, item.Line, s.key)
				}
				items = append(items, item.Value)
			}
			s.value = strings.Join(items, ",")
		default:
			return nil, usagef("%s:%d: %s: expected a value or a list", file, value.Line, s.key)
		}
		settings = append(settings, s)
	}
	return settings, nil
}

func newConfig() *cobra.Command {
	config := &cobra.Command{Use: "config", Short: "Look at configuration files"}
	var role string
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a configuration file without starting anything",
		Long: `Reads a role's configuration file as the role would, and reports the first
mistake: bad YAML, an unknown key, a value of the wrong kind. The role is the
file's name without .yaml, or --role.

A configuration file is a flat map whose keys are the names of the role's
flags. Environment variables named PENSTOCK_ and the key in capitals win over
the file, flags win over both.`,
		Example: `  penstock config check /etc/penstock/up.yaml
  penstock config check test.yaml --role mount`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := role
			if name == "" {
				name = strings.TrimSuffix(filepath.Base(args[0]), ".yaml")
			}
			target, _, err := cmd.Root().Find([]string{name})
			if err != nil || target.Flags().Lookup("config") == nil {
				return usagef("%q is no role that has a configuration file; name one with --role: %s", name, strings.Join(configRoles(cmd.Root()), ", "))
			}
			if err := applyFile(target, args[0]); err != nil {
				return err
			}
			cmd.Printf("%s: ok\n", args[0])
			return nil
		},
	}
	check.Flags().StringVar(&role, "role", "", "the subcommand that the file is for")
	config.AddCommand(check)
	return config
}

func configRoles(root *cobra.Command) []string {
	var roles []string
	for _, c := range root.Commands() {
		if c.Flags().Lookup("config") != nil {
			roles = append(roles, c.Name())
		}
	}
	return roles
}
