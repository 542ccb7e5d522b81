package fuse

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// Files with text for people: the directory .penstock in the mount's root, found by name and
// never listed. The files are read-only, made at each read, and have nodes in volume 0, which
// is no volume.
const (
	textsName = ".penstock"
	textsDir  = 2 // node id; 1 is the mount's root
)

// textKind is a file of .penstock: its name and the function that makes its text.
type textKind struct {
	name string
	show func(f *fileSystem) []byte
}

// textFiles are the files of .penstock; file i has node id textsDir+1+i.
var textFiles = []textKind{
	{"mount", (*fileSystem).showMount},
	{"volumes", (*fileSystem).showVolumes},
	{"requests", (*fileSystem).showRequests},
}

// openTexts holds the texts of a no-open mount, by node. Without OPEN the kernel reads a file
// through the page cache, up to the file's size, and keeps the bytes of the first read. So
// each lookup makes a new node with a fixed text, until the kernel forgets the node.
type openTexts struct {
	mu    sync.Mutex
	made  uint64
	texts map[uint64][]byte
}

// node makes a node with the given text; i is the index of the file.
func (t *openTexts) node(i int, text []byte) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.made++
	node := textsDir + 1 + uint64(i) + t.made*uint64(len(textFiles))
	if t.texts == nil {
		t.texts = make(map[uint64][]byte)
	}
	t.texts[node] = text
	return node
}

func (t *openTexts) forget(node uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.texts, node)
}

// textFile returns the index of a node's file; ok is false for any other node.
func textFile(node uint64) (i int, ok bool) {
	return int((node - textsDir - 1) % uint64(len(textFiles))), node > textsDir
}

// textOf returns the text of a node; empty if the node is no file.
func (f *fileSystem) textOf(node uint64) []byte {
	i, ok := textFile(node)
	if !ok {
		return nil
	}
	f.texts.mu.Lock()
	text, ok := f.texts.texts[node]
	f.texts.mu.Unlock()
	if !ok { // the mount has opens, or a predecessor made the node
		text = textFiles[i].show(f)
	}
	return text
}

// opNames are the names of opcodes in linux/fuse.h.
var opNames = [maxOpcode]string{
	1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir", 10: "unlink",
	11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync",
	21: "setxattr", 22: "getxattr", 23: "listxattr", 24: "removexattr", 25: "flush", 26: "init", 27: "opendir", 28: "readdir",
	29: "releasedir", 30: "fsyncdir", 31: "getlk", 32: "setlk", 33: "setlkw", 34: "access", 35: "create", 36: "interrupt",
	37: "bmap", 38: "destroy", 39: "ioctl", 40: "poll", 41: "notify_reply", 42: "batch_forget", 43: "fallocate",
	44: "readdirplus", 45: "rename2", 46: "lseek", 47: "copy_file_range", 50: "syncfs", 51: "tmpfile", 52: "statx",
	53: "copy_file_range_64",
}

// isText reports whether a node belongs to .penstock.
func isText(node uint64) bool { return node>>meta.InoBits == 0 && node != fuse.FUSE_ROOT_ID }

func textAttr(node uint64) fuse.Attr {
	i, _ := textFile(node)
	a := fuse.Attr{Ino: textsDir + 1 + uint64(i), Mode: meta.TypeRegular | 0o444, Nlink: 1, Blksize: meta.BlockSize}
	if node == textsDir {
		a.Ino, a.Mode, a.Nlink = textsDir, meta.TypeDir|0o555, 2
	}
	return a
}

// textDirectory is .penstock with its files.
type textDirectory struct{ f *fileSystem }

// enter answers the lookup of .penstock in the mount's root.
func (textDirectory) enter(out *fuse.EntryOut) fuse.Status {
	out.NodeId, out.Generation, out.Attr = textsDir, 1, textAttr(textsDir)
	return fuse.OK
}

func (d textDirectory) lookup(_ request, node uint64, name string, out *fuse.EntryOut) fuse.Status {
	if node != textsDir {
		return fuse.Status(errnos[meta.NotDir])
	}
	i := slices.IndexFunc(textFiles, func(v textKind) bool { return v.name == name })
	if i < 0 {
		return fuse.ENOENT
	}
	file := textsDir + 1 + uint64(i)
	out.NodeId, out.Generation, out.Attr = file, 1, textAttr(file)
	if d.f.noOpen {
		text := textFiles[i].show(d.f)
		out.NodeId, out.Size = d.f.texts.node(i, text), uint64(len(text))
	}
	return fuse.OK
}

func (d textDirectory) getAttr(_ request, node uint64, out *fuse.AttrOut) fuse.Status {
	out.Attr = textAttr(node)
	if d.f.noOpen {
		out.Size = uint64(len(d.f.textOf(node)))
	}
	return fuse.OK
}

// statx has the kernel ask for attributes, which have no birth time.
func (textDirectory) statx(request, uint64, *fuse.StatxOut) fuse.Status { return fuse.ENOSYS }

func (d textDirectory) readDir(_ request, in *fuse.ReadIn, add addEntry) fuse.Status {
	f, from := d.f, in.Offset
	list := []fuse.DirEntry{
		{Name: ".", Ino: textsDir, Mode: meta.TypeDir, Off: afterDot},
		{Name: "..", Ino: f.inumbers.of(f.rootVolume, f.rootIno), Mode: meta.TypeDir, Off: afterDotDot},
	}
	for i, v := range textFiles {
		list = append(list, fuse.DirEntry{Name: v.name, Ino: textsDir + 1 + uint64(i), Mode: meta.TypeRegular, Off: uint64(3 + i)})
	}
	for _, e := range list[min(from, uint64(len(list))):] {
		if !add(e, nil) {
			break
		}
	}
	return fuse.OK
}

func (f *fileSystem) readText(node uint64, p []byte, off int64) int {
	text := f.textOf(node)
	if off < 0 {
		return 0
	}
	return copy(p, text[min(off, int64(len(text))):])
}

func (f *fileSystem) showMount() []byte {
	var b bytes.Buffer
	id, ino := f.split(fuse.FUSE_ROOT_ID)
	fmt.Fprintf(&b, "root %d:%d\nincarnation %016x\nkernel 7.%d\nsyncfs %v\npassthrough %v\nno-open %v\n",
		id, ino, f.incarnation, f.conn.minor, f.conn.syncfs, !f.noPassthrough, f.noOpen)
	return b.Bytes()
}

// showRequests lists the number of the kernel's requests by opcode.
func (f *fileSystem) showRequests() []byte {
	var b bytes.Buffer
	for op := range f.conn.requests {
		if n := f.conn.requests[op].Load(); n > 0 {
			fmt.Fprintf(&b, "%s %d\n", cmp.Or(opNames[op], fmt.Sprint("opcode ", op)), n)
		}
	}
	return b.Bytes()
}

func (f *fileSystem) showVolumes() []byte {
	var b bytes.Buffer
	f.mu.RLock()
	defer f.mu.RUnlock()
	for id, v := range f.volumes {
		fmt.Fprintf(&b, "%d %s\n", id, v.Name())
	}
	return b.Bytes()
}
