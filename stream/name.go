package stream

import (
	"errors"
	"fmt"
	"path"
	"strconv"
	"strings"

	"penstock.io/penstock/meta"
)

// maxTopic is the greatest length of a topic name for Kafka's clients.
const maxTopic = 249

// kept reports that a byte of a path stands for itself in a topic name.
func kept(b byte) bool {
	return 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9' || b == '_' || b == '-'
}

// Escape replaces every byte beside letters, digits, _ and - by two dots and two
// hexadecimal digits.
func Escape(name string) string {
	var b strings.Builder
	for i := range len(name) {
		if kept(name[i]) {
			b.WriteByte(name[i])
		} else {
			fmt.Fprintf(&b, "..%02x", name[i])
		}
	}
	return b.String()
}

// unescape is the reverse of Escape; ok is false if no name has the escaped form.
func unescape(text string) (name string, ok bool) {
	var b []byte
	for i := 0; i < len(text); i++ {
		if text[i] != '.' {
			b = append(b, text[i])
			continue
		}
		if i+4 > len(text) {
			return "", false
		}
		c, err := strconv.ParseUint(text[i+2:i+4], 16, 8)
		if err != nil {
			return "", false
		}
		b = append(b, byte(c))
		i += 3
	}
	return string(b), Escape(string(b)) == text
}

// Topic returns the topic name of a path of the tree: a slash becomes a dot, the rest is
// escaped. Errors: Invalid (the root, or an unclean path), NameTooLong (the topic's
// name would be longer than Kafka's clients accept).
func Topic(p string) (string, error) {
	const op = "name a topic"
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
		return "", meta.E(op, meta.Invalid, p, errors.New("a stream has a path such as /volume/name"))
	}
	parts := strings.Split(p[1:], "/")
	for i := range parts {
		parts[i] = Escape(parts[i])
	}
	name := strings.Join(parts, ".")
	if len(name) > maxTopic {
		return "", meta.E(op, meta.NameTooLong, p, fmt.Errorf("its topic name has %d bytes, Kafka's clients accept %d", len(name), maxTopic))
	}
	return name, nil
}

// Path returns the path of a topic: the reverse of Topic. The aliases /volume/name and
// /volume/dir:name are accepted, too. Errors: Invalid (no path has this topic name).
func Path(topic string) (string, error) {
	bad := func(why string) (string, error) {
		return "", meta.E("find a topic's path", meta.Invalid, topic, errors.New(why))
	}
	if strings.HasPrefix(topic, "/") {
		p := path.Clean(strings.ReplaceAll(topic, ":", "/"))
		if p == "/" || strings.ContainsRune(p, 0) {
			return bad("the root is no stream")
		}
		return p, nil
	}
	if topic == "" || len(topic) > maxTopic {
		return bad(fmt.Sprintf("a topic name has 1 to %d bytes", maxTopic))
	}
	var b strings.Builder
	b.WriteByte('/')
	for i := 0; i < len(topic); {
		dots := 0
		for i+dots < len(topic) && topic[i+dots] == '.' {
			dots++
		}
		switch dots {
		case 0:
			if !kept(topic[i]) {
				return bad("a topic name has letters, digits, dots, _ and -")
			}
			b.WriteByte(topic[i])
			i++
			continue
		case 1, 3:
			b.WriteByte('/')
		}
		i += dots
		if dots == 1 {
			continue
		}
		if dots > 3 || len(topic) < i+2 {
			return bad("two dots begin the two hexadecimal digits of a byte")
		}
		var c byte
		if _, err := fmt.Sscanf(topic[i:i+2], "%02x", &c); err != nil || fmt.Sprintf("%02x", c) != topic[i:i+2] || kept(c) || c == '/' || c == 0 {
			return bad("two dots begin the two hexadecimal digits of a byte that needs them")
		}
		b.WriteByte(c)
		i += 2
	}
	p := b.String()
	if path.Clean(p) != p {
		return bad("no path has this topic name")
	}
	return p, nil
}
