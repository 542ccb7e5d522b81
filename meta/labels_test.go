package meta_test

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

func TestLabelSyntax(t *testing.T) {
	long := strings.Repeat("a", meta.MaxLabel)
	for key, ok := range map[string]bool{
		"team": true, "a": true, "A-b_c.9": true, "example.com/team": true, long: true, "x/" + long: true, "a-b.c/d": true,
		"": false, "-a": false, "a-": false, "a b": false, "a/b/c": false, "/a": false, "a/": false, long + "a": false, "ä": false,
		"Example.com/a": false, "a_b/c": false, "a..b/c": false, strings.Repeat("a.", 127) + "a/b": false, "a=b": false, "a,b": false,
	} {
		if err := meta.CheckLabelKey(key); (err == nil) != ok || err != nil && !errors.Is(err, meta.Invalid) {
			t.Errorf("key %q: %v", key, err)
		}
	}
	for value, ok := range map[string]bool{"": true, "v1.2": true, long: true, long + "a": false, "-": false, "a/b": false, "a b": false} {
		if err := meta.CheckLabelValue(value); (err == nil) != ok {
			t.Errorf("value %q: %v", value, err)
		}
	}
	one := "1"
	many := map[string]*string{}
	for i := range meta.MaxLabels {
		many[fmt.Sprint("k", i)] = &one
	}
	if err := meta.CheckLabels(many); err != nil {
		t.Error(err)
	}
	have, err := meta.ChangeLabels(nil, many)
	if err != nil || len(have) != meta.MaxLabels {
		t.Fatal(len(have), err)
	}
	if _, err := meta.ChangeLabels(have, map[string]*string{"more": &one}); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("one label too many: %v", err)
	}
	if now, err := meta.ChangeLabels(have, map[string]*string{"more": &one, "k0": nil}); err != nil || now["more"] != "1" || len(now) != meta.MaxLabels || len(have) != meta.MaxLabels {
		t.Errorf("%d labels, %v", len(now), err)
	}
	wide := map[string]*string{}
	for i := range meta.MaxLabelBytes / (meta.MaxLabelPrefix + 2*meta.MaxLabel) {
		wide[strings.Repeat("a.", meta.MaxLabelPrefix/2-5)+fmt.Sprintf("%09d/%s", i, long)] = &long
	}
	if err := meta.CheckLabels(wide); err != nil {
		t.Error(err)
	}
	if have, err = meta.ChangeLabels(nil, wide); err != nil {
		t.Error(err)
	}
	wider := map[string]*string{"x" + long[1:]: &long, "y" + long[1:]: &long, "z" + long[1:]: &long}
	if now, err := meta.ChangeLabels(have, wider); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("%d labels of too many bytes: %v", len(now), err)
	}
	maps.Copy(wide, wider)
	if err := meta.CheckLabels(wide); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("too many bytes: %v", err)
	}
	if now, err := meta.ChangeLabels(map[string]string{"a": "b"}, map[string]*string{"a": nil}); now != nil || err != nil {
		t.Errorf("%v, %v", now, err)
	}
}

func TestLabelSelector(t *testing.T) {
	sets := []map[string]string{nil, {"team": "vision"}, {"team": "speech", "tier": ""}, {"team": "vision", "example.com/run": "42"}}
	for text, want := range map[string]string{
		"team": "123", "!team": "0", "team=vision": "13", "team==vision": "13", "team!=vision": "02", "tier=": "2", "tier!=": "013",
		"team in (vision, speech)": "123", "team notin (vision)": "02", "team in (speech),tier": "2", "example.com/run = 42": "3",
		" team=vision , !example.com/run ": "1", "team in(speech)": "2", "tier in (,x)": "2",
		"": "x", ",": "x", "team,": "x", "=": "x", "team=a b": "x", "team in vision": "x", "team in (vision": "x", "!team=vision": "x", "team in (vision) tier": "x", "a b": "x", "team > 3": "x",
	} {
		s, err := meta.ParseLabelSelector(text)
		got := ""
		for i, labels := range sets {
			if err == nil && s.Matches(labels) {
				got += fmt.Sprint(i)
			}
		}
		if want == "x" {
			if !errors.Is(err, meta.Invalid) {
				t.Errorf("%q: %v, %v", text, s, err)
			}
		} else if err != nil || got != want {
			t.Errorf("%q picks %q, not %q: %v", text, got, want, err)
		}
	}
	if !meta.LabelSelector(nil).Matches(nil) {
		t.Error("no demand picks all")
	}
}

// FuzzLabelSelector: a parsed selector is written as a selector with the same meaning.
func FuzzLabelSelector(f *testing.F) {
	for _, s := range []string{"a", "!a", "a=b", "a!=b", "a in (b,c)", "x.y/a notin (), b == c", "a,b,!c", "in in (in)", "notin notin (notin)"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := meta.ParseLabelSelector(text)
		if err != nil {
			return
		}
		for _, d := range s {
			if err := meta.CheckLabelKey(d.Key); err != nil {
				t.Fatal(err)
			}
		}
		if again, err := meta.ParseLabelSelector(s.String()); err != nil || !reflect.DeepEqual(again, s) {
			t.Fatalf("%q is %q, read again %q, %v", text, s, again, err)
		}
	})
}

// TestPolicyWords: every field of a policy has one word, and the word changes only the field.
func TestPolicyWords(t *testing.T) {
	full := meta.Policy{QuotaBytes: 1, QuotaInodes: 2, QuotaSnapshots: true, Replicas: 3, MaxChunk: 4, SealOnClose: true, Immutable: true, SyncOnClose: true, NoAtime: true,
		Topology: "/dc", Spread: meta.SpreadRack, Class: "ssd", LocalFirst: true, MinReplicas: 1, Encrypt: true}
	changed := map[string]string{}
	for _, w := range meta.PolicyWords() {
		var p meta.Policy
		if err := p.Change(&full, w); err != nil {
			t.Fatal(err)
		}
		for i, v := 0, reflect.ValueOf(p); i < v.NumField(); i++ {
			if !v.Field(i).IsZero() {
				name := v.Type().Field(i).Name
				if changed[name] != "" {
					t.Errorf("%s is changed by %s and %s", name, changed[name], w)
				}
				changed[name] = w
			}
		}
	}
	typ := reflect.TypeFor[meta.Policy]()
	if len(changed) != typ.NumField() || len(meta.PolicyWords()) != typ.NumField() {
		t.Errorf("%d words change %d of %d fields: %v", len(meta.PolicyWords()), len(changed), typ.NumField(), slices.Sorted(maps.Keys(changed)))
	}
	var p meta.Policy
	if err := p.Change(&full, "nothing"); !errors.Is(err, meta.NotSupported) {
		t.Error(err)
	}
	if d := full.Differs(&p); !slices.Equal(d, meta.PolicyWords()) || len(full.Differs(&full)) != 0 || full.Differs(&full) == nil {
		t.Errorf("they differ in %v", d)
	}
	if err := p.Change(&full, meta.PolicyWords()...); err != nil || p != full {
		t.Errorf("%+v, %v", p, err)
	}
}
