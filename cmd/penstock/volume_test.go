package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"penstock.io/penstock/meta"
)

func TestPolicyFlags(t *testing.T) {
	base := meta.Policy{Replicas: 1, LocalFirst: true}
	for args, want := range map[string]meta.Policy{
		"--replicas 3 --spread rack --topology dc1/rack2/ --class ssd": {Replicas: 3, LocalFirst: true, Spread: meta.SpreadRack, Topology: "/dc1/rack2", Class: "ssd"},
		"--max-chunk 64M": {Replicas: 1, LocalFirst: true, MaxChunk: 64 << 20},
		"--topology / --local-first=false --replicas 2 --min-replicas 1 --encrypt": {Replicas: 2, MinReplicas: 1, Encrypt: true},
	} {
		got := base
		var p policyFlags
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		p.add(f)
		if err := f.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		words, err := p.change(f, &got)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v, %v; want %+v", args, got, words, err, want)
		}
		// A request that names only these words changes the same.
		only := base
		if err := only.Change(&got, words...); err != nil || only != want || strings.Count(args, "--") != len(words) {
			t.Errorf("%s: the words %v, %v", args, words, err)
		}
	}
	p := policyFlags{}
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	p.add(f)
	for _, name := range meta.PolicyWords() {
		if f.Lookup(name) == nil {
			t.Errorf("no flag is called as the word %s of a policy", name)
		}
	}
	for args, text := range map[string]string{
		"--max-chunk 1M": "4194304", "--max-chunk 2G": "1073741824",
		"--replicas 0": "replicas", "--replicas 17": "1 to 16", "--replicas 2 --min-replicas 3": "at least 3", "--spread row": "host, rack or dc", "--class SSD": "lower-case", "--topology /a/b:c": "b:c",
	} {
		got := base
		var p policyFlags
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		p.add(f)
		if err := f.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		_, err := p.change(f, &got)
		var usage *usageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want a usage error with %q", args, err, text)
		}
	}
}

func TestLabelFlags(t *testing.T) {
	got, err := parseLabels([]string{"team=vision", "run=", "draft-", "a-b=c"})
	if err != nil || len(got) != 4 || *got["team"] != "vision" || *got["run"] != "" || got["draft"] != nil || *got["a-b"] != "c" {
		t.Errorf("%v, %v", got, err)
	}
	for _, args := range [][]string{{"team"}, {"=x"}, {"-"}, {""}, {"a b=c"}, {"a=b c"}, {"a=b=c"}, {"a=1", "a-"}, {"a/b/c=1"}} {
		_, err := parseLabels(args)
		var usage *usageError
		if !errors.As(err, &usage) {
			t.Errorf("%q: %v, want a usage error", args, err)
		}
	}
}
