package stream

import (
	"errors"
	"path"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func TestTopics(t *testing.T) {
	for p, topic := range map[string]string{
		"/v/clicks":      "v.clicks",
		"/v":             "v",
		"/a.b/c d":       "a..2eb.c..20d",
		"/v/.hidden/é":   "v...2ehidden...c3..a9",
		"/v/a..b":        "v.a..2e..2eb",
		"/V-1/under_bar": "V-1.under_bar",
	} {
		got, err := Topic(p)
		if err != nil || got != topic {
			t.Errorf("%s has topic %q, %v; want %q", p, got, err, topic)
		}
		if back, err := Path(topic); err != nil || back != p {
			t.Errorf("topic %q has path %q, %v; want %q", topic, back, err, p)
		}
	}
	for alias, p := range map[string]string{"/v/clicks": "/v/clicks", "/v/dir:clicks": "/v/dir/clicks", "/v//clicks/": "/v/clicks"} {
		if got, err := Path(alias); err != nil || got != p {
			t.Errorf("alias %q has path %q, %v; want %q", alias, got, err, p)
		}
	}
	for _, topic := range []string{"", ".", "..", "...", "....", ".a", "a.", "a..", "a..2", "a..2E", "a..61", "a..2f", "a..00", "a....b", "a b", "é", "..2e", "a...2e..2e.b", "/", "/\x00", strings.Repeat("a", 250)} {
		if p, err := Path(topic); !errors.Is(err, meta.Invalid) {
			t.Errorf("topic %q has path %q, %v", topic, p, err)
		}
	}
	for _, p := range []string{"", "/", "v", "/v/", "/v/../w", "/v//w", "/v/\x00"} {
		if topic, err := Topic(p); !errors.Is(err, meta.Invalid) {
			t.Errorf("path %q has topic %q, %v", p, topic, err)
		}
	}
	if _, err := Topic("/" + strings.Repeat("a", 250)); !errors.Is(err, meta.NameTooLong) {
		t.Error("a long name:", err)
	}
}

// FuzzTopics: a path has one topic and a topic one path, in Kafka's letters.
func FuzzTopics(f *testing.F) {
	for _, s := range []string{"/v/clicks", "v.clicks", "/a b/..", "a...2eb", "/v/dir:topic", "/é/\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if topic, err := Topic(s); err == nil {
			if strings.Trim(topic, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "" || len(topic) > maxTopic || topic == "." || topic == ".." {
				t.Errorf("%q has topic %q", s, topic)
			}
			if p, err := Path(topic); err != nil || p != s {
				t.Errorf("%q becomes %q becomes %q, %v", s, topic, p, err)
			}
		}
		p, err := Path(s)
		if err != nil {
			return
		}
		if path.Clean(p) != p || p[0] != '/' || p == "/" {
			t.Errorf("topic %q has path %q", s, p)
		}
		if topic, err := Topic(p); s[0] != '/' && (err != nil || topic != s) {
			t.Errorf("topic %q becomes %q becomes %q, %v", s, p, topic, err)
		}
	})
}

func TestSpec(t *testing.T) {
	s := Spec{Partitions: 4, NamedPartitions: 2, Format: "json", Retention: 7 * 24 * time.Hour, RetentionBytes: 1 << 30, SegmentBytes: 1 << 20, SegmentAge: time.Hour, MaxBatch: 1000, Lag: 10 * time.Second, Schema: "a:string"}
	if got, err := DecodeSpec(s.Encode()); err != nil || got != s {
		t.Errorf("%+v becomes %+v, %v", s, got, err)
	}
	for text, kind := range map[string]meta.Kind{
		`{`:                             meta.Corrupt,
		`{"partitions":1}`:              meta.Corrupt,
		`{"version":2,"partitions":1}`:  meta.Version,
		`{"version":1}`:                 meta.Invalid,
		`{"version":1,"partitions":-1}`: meta.Invalid,
		`{"version":1,"partitions":1,"format":"xml"}`:                    meta.Invalid,
		`{"version":1,"partitions":1,"retention":"later"}`:               meta.Corrupt,
		`{"version":1,"partitions":1,"segment_bytes":1}`:                 meta.Invalid,
		`{"version":1,"partitions":1,"lag":"1ms"}`:                       meta.Invalid,
		`{"version":1,"partitions":1,"lag":"1h"}`:                        meta.Invalid,
		`{"version":1,"partitions":1,"schema":"a:long"}`:                 meta.Invalid,
		`{"version":1,"partitions":1,"format":"json","schema":"a:text"}`: meta.Invalid,
	} {
		if _, err := DecodeSpec([]byte(text)); meta.KindOf(err) != kind {
			t.Errorf("%s: %v, want %v", text, err, kind)
		}
	}
}

// TestUnescape: the name of a group comes back from the name of the group's file.
func TestUnescape(t *testing.T) {
	for _, name := range []string{"", "g", "a.b/c", "..", "é \x00\xff", "Group-1_x"} {
		if got, ok := unescape(Escape(name)); !ok || got != name {
			t.Errorf("DATA: %q is %q, %v", name, got, ok)
		}
	}
	for _, text := range []string{".", "..", "..4", "..zz", "..41", "..2E", "a b"} {
		if got, ok := unescape(text); ok {
			t.Errorf("%q is %q", text, got)
		}
	}
}

func FuzzSpec(f *testing.F) {
	f.Add((&Spec{Partitions: 4, Retention: time.Hour}).Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := DecodeSpec(b)
		if err != nil {
			return
		}
		if s.Format == "" {
			s.Format = Formats[0]
		}
		if again, err := DecodeSpec(s.Encode()); err != nil || again != s {
			t.Errorf("%+v becomes %+v, %v", s, again, err)
		}
	})
}
