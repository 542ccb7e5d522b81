package fuse

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Files for people: the directory .penstock in the mount's root, found by name
// and never listed. They are read-only, made when they are read, and live in
// volume 0, which is no volume.
const (
	virtualName = ".penstock"
	virtualDir  = 2 // node id; 1 is the mount's root
)

// virtualFiles are its files; the node id is virtualDir+1 and on.
var virtualFiles = []struct {
	name string
	show func(f *fileSystem) []byte
}{
	{"mount", (*fileSystem).showMount},
	{"volumes", (*fileSystem).showVolumes},
	{"requests", (*fileSystem).showRequests},
}

// virtualTexts are what the files of a no-open mount say, by node. Opened without
// an OPEN, a file is read through the page cache, up to the size that it has and
// as it was read first. So each lookup makes a node that says one thing, until the
// kernel forgets it.
type virtualTexts struct {
	mu    sync.Mutex
	made  uint64
	texts map[uint64][]byte
}

// node makes one that says text; i is the index of the file.
func (t *virtualTexts) node(i int, text []byte) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.made++
	node := virtualDir + 1 + uint64(i) + t.made*uint64(len(virtualFiles))
	if t.texts == nil {
		t.texts = make(map[uint64][]byte)
	}
	t.texts[node] = text
	return node
}

func (t *virtualTexts) forget(node uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.texts, node)
}

// virtualFile is the index of the file that a node is.
func virtualFile(node uint64) (i int, ok bool) {
	return int((node - virtualDir - 1) % uint64(len(virtualFiles))), node > virtualDir
}

// virtualText is what a node says; empty for what is no file.
func (f *fileSystem) virtualText(node uint64) []byte {
	i, ok := virtualFile(node)
	if !ok {
		return nil
	}
	f.texts.mu.Lock()
	text, ok := f.texts.texts[node]
	f.texts.mu.Unlock()
	if !ok { // of a mount whose opens are told, or a predecessor's
		text = virtualFiles[i].show(f)
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

// isVirtual reports whether a node belongs to .penstock.
func isVirtual(node uint64) bool { return node>>meta.InoBits == 0 && node != fuse.FUSE_ROOT_ID }

func virtualAttr(node uint64) fuse.Attr {
	i, _ := virtualFile(node)
	a := fuse.Attr{Ino: virtualDir + 1 + uint64(i), Mode: meta.TypeRegular | 0o444, Nlink: 1, Blksize: meta.BlockSize}
	if node == virtualDir {
		a.Ino, a.Mode, a.Nlink = virtualDir, meta.TypeDir|0o555, 2
	}
	return a
}

func (f *fileSystem) virtualAttr(node uint64, out *fuse.AttrOut) fuse.Status {
	out.Attr = virtualAttr(node)
	if f.noOpen {
		out.Size = uint64(len(f.virtualText(node)))
	}
	return fuse.OK
}

// virtualLookup answers for names in and of .penstock; ok false: ask the tree.
func (f *fileSystem) virtualLookup(parent uint64, name string, out *fuse.EntryOut) (st fuse.Status, ok bool) {
	node := uint64(0)
	switch {
	case parent == fuse.FUSE_ROOT_ID && name == virtualName:
		node = virtualDir
	case parent == virtualDir:
		i := slices.IndexFunc(virtualFiles, func(v struct {
			name string
			show func(f *fileSystem) []byte
		}) bool {
			return v.name == name
		})
		if i < 0 {
			return fuse.ENOENT, true
		}
		node = virtualDir + 1 + uint64(i)
		if f.noOpen {
			text := virtualFiles[i].show(f)
			out.NodeId, out.Generation, out.Attr = f.texts.node(i, text), 1, virtualAttr(node)
			out.Size = uint64(len(text))
			return fuse.OK, true
		}
	case isVirtual(parent):
		return fuse.Status(errnos[meta.NotDir]), true
	default:
		return 0, false
	}
	out.NodeId, out.Generation, out.Attr = node, 1, virtualAttr(node)
	return fuse.OK, true
}

func (f *fileSystem) virtualReadDir(from uint64, add func(fuse.DirEntry, *penstock.Entry) bool) fuse.Status {
	list := []fuse.DirEntry{
		{Name: ".", Ino: virtualDir, Mode: meta.TypeDir, Off: afterDot},
		{Name: "..", Ino: f.inumber(f.rootVolume, f.rootIno), Mode: meta.TypeDir, Off: afterDotDot},
	}
	for i, v := range virtualFiles {
		list = append(list, fuse.DirEntry{Name: v.name, Ino: virtualDir + 1 + uint64(i), Mode: meta.TypeRegular, Off: uint64(3 + i)})
	}
	for _, e := range list[min(from, uint64(len(list))):] {
		if !add(e, nil) {
			break
		}
	}
	return fuse.OK
}

func (f *fileSystem) virtualRead(node uint64, p []byte, off int64) int {
	text := f.virtualText(node)
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

// showRequests counts what the kernel asked for.
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
