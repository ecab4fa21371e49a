"""The story grammar in Chinese."""

from __future__ import annotations

from zero2all.quickstart.world.stories import Arc, StoryBook

LOST_THING = Arc(
    title="{hero}找{object}",
    scenes=(
        (
            "玩着玩着，{hero}发现自己的{object}不见了。",
            "{hero}伸手一摸，{object}竟然不在包里。",
            "正要回家，{hero}才想起{object}不知丢在了哪里。",
            "{hero}把口袋翻了个遍，怎么也找不到{object}。",
        ),
        (
            "{ta}心里很{sad}，不知道怎么办才好。",
            "{hero}东找西找，越找越{sad}。",
            "{ta}站在原地，{sad}得说不出话来。",
        ),
        (
            "{friend}说：“别急，我陪你一起找。”",
            "{friend}看见了，马上跑过来帮忙。",
            "“两个人找总比一个人快。”{friend}说。",
        ),
        (
            "找了好半天，{friend}终于在{hiding}发现了{object}。",
            "忽然，{friend}看到{hiding}有什么东西，原来正是{object}。",
            "天快黑的时候，{friend}在{hiding}把它捡了回来。",
        ),
        (
            "{hero}连声道谢，还拿出{food}和{friend}分着吃。",
            "为了感谢{friend}，{hero}把带来的{food}分了一半给对方。",
            "两个人都笑了，坐下来一起吃{food}。",
        ),
    ),
    questions=(
        ("{hero}丢了什么？", "丢了{object}。"),
        ("是谁找到了{object}？", "是{friend}。"),
        ("{object}是在哪儿找到的？", "在{hiding}。"),
        ("他们一起吃了什么？", "吃了{food}。"),
    ),
    slots={
        "object": ("红风筝", "铜钥匙", "蓝围巾", "竹笛", "旧地图", "绿雨伞", "小铃铛", "皮球", "铁皮盒", "指南针"),
        "hiding": ("长椅下面", "大石头后面", "草丛里", "水井旁边", "树根底下", "矮墙上", "落叶堆里"),
    },
)

HURT_ANIMAL = Arc(
    title="{hero}和小{animal}",
    scenes=(
        (
            "{hero}看见路边的草丛里躺着一只小{animal}，一动也不动。",
            "{hero}听见细细的叫声，走近一看，原来是一只小{animal}。",
            "{hero}发现一只小{animal}缩在石头缝里。",
        ),
        (
            "它的腿受了伤，浑身发抖。",
            "它脚上扎了一根刺，疼得直叫。",
            "它又冷又饿，眼睛都快睁不开了。",
        ),
        (
            "{hero}用{cloth}把它轻轻裹好，抱去找{friend}。",
            "{ta}拿出{cloth}给它垫着，又喊来了{friend}。",
            "{ta}小心地把它放进{cloth}里，跑去叫{friend}。",
        ),
        (
            "{friend}给它洗了伤口，又喂它吃{animal_food}。",
            "{friend}懂得照顾动物，端来了{animal_food}。",
            "“先让它吃点{animal_food}，再好好休息。”{friend}说。",
        ),
        (
            "过了{days}天，小{animal}的伤好了，他们把它放回了山里。",
            "养了{days}天，小{animal}又能跑能跳了。",
            "{days}天以后，小{animal}恢复了精神，高高兴兴地回家去了。",
        ),
    ),
    questions=(
        ("{hero}发现了什么？", "一只小{animal}。"),
        ("{hero}去找谁帮忙？", "去找{friend}。"),
        ("他们给小{animal}吃了什么？", "吃了{animal_food}。"),
        ("过了几天它才好？", "过了{days}天。"),
        ("{hero}用什么包着小{animal}？", "用{cloth}。"),
    ),
    slots={
        "animal": ("麻雀", "狐狸", "刺猬", "野鸭", "野兔", "梅花鹿", "燕子", "獾"),
        "cloth": ("外套", "围巾", "毯子", "毛巾", "布袋"),
        "animal_food": ("米粥", "温牛奶", "野果", "菜叶", "小米"),
        "days": ("三", "四", "五", "六", "十"),
    },
)

MAKING = Arc(
    title="{hero}做{thing}",
    scenes=(
        (
            "{hero}想亲手做一个{thing}，送给{relative}。",
            "{relative}快过生日了，{hero}决定做一个{thing}当礼物。",
            "{hero}心里有个主意：做一个{thing}，给{relative}一个惊喜。",
        ),
        (
            "谁知第一个刚做好就坏了。",
            "第一次做得歪歪扭扭，{ta}自己都笑了。",
            "看着挺像样，可是一拿起来就散了架。",
        ),
        (
            "{hero}有点{sad}，差点不想做了。",
            "{ta}{sad}地坐在地上，一句话也不说。",
            "忙了半天白费力气，{ta}觉得很{sad}。",
        ),
        (
            "{friend}看了看，说：“你忘了用{material}。”",
            "“再加些{material}试试吧。”{friend}提醒道。",
            "这时{friend}找来了{material}，说有了它就不会散。",
        ),
        (
            "第二个{thing}又结实又漂亮。",
            "这一回，{ta}做得很慢，{thing}终于做成了。",
            "按这个办法一做，{thing}果然好了。",
        ),
    ),
    questions=(
        ("{hero}做了什么？", "一个{thing}。"),
        ("{thing}要送给谁？", "送给{relative}。"),
        ("开始时少了什么？", "少了{material}。"),
        ("谁给{hero}出了主意？", "是{friend}。"),
    ),
    slots={
        "place": ("木工房", "后院", "教室", "老仓库", "院子里"),
        "thing": ("鸟窝", "灯笼", "风车", "小木船", "风筝", "泥娃娃", "小板凳"),
        "material": ("胶水", "麻绳", "钉子", "铁丝", "竹条", "牛皮纸"),
    },
)

STORM = Arc(
    title="{hero}遇上大雨",
    scenes=(
        (
            "他们本来要去看望{relative}，天却一下子黑了。",
            "去{relative}家的路上，天边滚来一片乌云。",
            "他们刚动身去看{relative}，就听见了雷声。",
        ),
        (
            "雨越下越大，连路都看不清了。",
            "不一会儿，两个人的鞋里全是水。",
            "风呼呼地吹，伞也撑不住。",
        ),
        (
            "{friend}指着前面的{shelter}，拉着{hero}就跑。",
            "“快，到{shelter}里去！”{friend}喊道。",
            "还好{friend}知道附近有个{shelter}，他们就躲了进去。",
        ),
        (
            "{hero}拿出带着的{food}，两个人边吃边等。",
            "肚子饿了，他们就分着吃{hero}带的{food}。",
            "他们靠在一起，吃着{food}，听外面的雨声。",
        ),
        (
            "雨停以后，天上出现了{after}。",
            "等了很久，云散了，他们看见了{after}。",
            "走出来一看，{after}正挂在天边。",
        ),
    ),
    questions=(
        ("他们本来要去看谁？", "要去看{relative}。"),
        ("他们躲在哪里？", "躲在{shelter}里。"),
        ("是谁先想到那个地方的？", "是{friend}。"),
        ("他们吃了什么？", "吃了{food}。"),
        ("雨停后看到了什么？", "看到了{after}。"),
    ),
    slots={
        "weather": ("晴朗", "刮着风", "温暖", "闷热", "凉爽", "多云"),
        "shelter": ("山洞", "破庙", "草棚", "凉亭", "牛棚", "空屋子"),
        "after": ("彩虹", "月亮", "晚霞", "第一颗星星"),
    },
)

QUARREL = Arc(
    title="为{object}吵了一架",
    scenes=(
        (
            "{object}只有一个，两个人都想要。",
            "{hero}和{friend}都想先玩那个{object}。",
            "{hero}刚拿起{object}，{friend}也伸手来抢。",
        ),
        (
            "你拉我扯，结果把它弄坏了。",
            "谁也不肯松手，只听啪的一声，它坏了。",
            "两个人越吵越凶，不小心把它摔坏了。",
        ),
        (
            "{friend}气得一个人跑到{retreat}去了。",
            "{friend}一句话不说，转身去了{retreat}。",
            "{friend}红着脸走开，躲到{retreat}生闷气。",
        ),
        (
            "{hero}很{sad}，找来{material}，把它修好了。",
            "{hero}想来想去，心里{sad}，就用{material}慢慢地修。",
            "冷静下来以后，{hero}用{material}把它一点一点粘好。",
        ),
        (
            "{ta}走到{friend}面前说：“对不起，你先玩吧。”",
            "“是我不好。”{ta}对{friend}说，{friend}也笑了。",
            "{ta}把它递给{friend}，说：“以后我们轮着玩。”",
        ),
    ),
    questions=(
        ("他们为什么吵架？", "为了{object}。"),
        ("{friend}跑到哪儿去了？", "去了{retreat}。"),
        ("{hero}用什么修好了{object}？", "用{material}。"),
        ("最后是谁道歉的？", "是{hero}。"),
    ),
    slots={
        "object": ("玩具火车", "拨浪鼓", "木偶", "陀螺", "小木马", "纸灯笼", "万花筒", "铁环"),
        "retreat": ("老桥边", "马棚", "厨房", "苹果树下", "井台边", "阁楼上"),
        "material": ("胶水", "麻绳", "钉子", "铁丝", "浆糊"),
    },
)

TRADE = Arc(
    title="{hero}换来了{wish}",
    scenes=(
        (
            "{hero}带着用不着的{object}，想换点别的东西。",
            "{hero}包里放着{object}，打算拿去换样好东西。",
            "家里的{object}早就不用了，{hero}想把它换出去。",
        ),
        (
            "一位{seller}愿意拿{wish}来换。",
            "有个{seller}摆出了{wish}，问{ta}换不换。",
            "{ta}遇到一位{seller}，对方正好有{wish}。",
        ),
        (
            "{ta}拿不定主意，就去问{friend}。",
            "“这样换划算吗？”{ta}问{friend}。",
            "{ta}想了想，回头看着{friend}。",
        ),
        (
            "{friend}点点头，于是{hero}交出{object}，拿到了{wish}。",
            "“我看行。”{friend}说。{hero}就用{object}换了{wish}。",
            "{friend}说值得，{object}就这样换成了{wish}。",
        ),
        (
            "{seller}也很满意，又送了他们一些{food}。",
            "临走时，{seller}笑着塞给他们{food}。",
            "“路上吃吧。”{seller}说着，递过来一包{food}。",
        ),
    ),
    questions=(
        ("{hero}拿什么去换？", "拿{object}去换。"),
        ("{hero}换到了什么？", "换到了{wish}。"),
        ("{hero}跟谁换的？", "跟一位{seller}。"),
        ("{hero}问了谁的意见？", "问了{friend}。"),
        ("{seller}还送了什么？", "送了{food}。"),
    ),
    slots={
        "place": ("集市", "码头", "广场", "庙会", "火车站"),
        "object": ("毛线帽", "铁皮杯", "玻璃瓶", "旧画册", "竹篮", "油灯", "布书包"),
        "wish": ("口琴", "放大镜", "鱼竿", "棉手套", "拼图", "小镜子", "铜铃"),
        "seller": ("农夫", "货郎", "老奶奶", "牧羊人", "织布匠", "磨坊主"),
    },
)

GARDEN = Arc(
    title="{hero}种{plant}",
    scenes=(
        (
            "{relative}送给{hero}一粒{plant}种子，{ta}把它种进了土里。",
            "{hero}挖了个小坑，种下{relative}给的{plant}种子。",
            "{hero}得到一粒{plant}种子，是{relative}给的，当天就种下了。",
        ),
        (
            "好多天过去了，地里一点动静也没有，{ta}很{sad}。",
            "{ta}天天去看，看到的只有泥土，心里有些{sad}。",
            "一个星期没见一片叶子，{hero}越来越{sad}。",
        ),
        (
            "“耐心点，它还缺{care}。”{friend}说。",
            "{friend}告诉{ta}，种子需要{care}，还要等一等。",
            "{friend}每天都来帮忙，说只要有{care}就能活。",
        ),
        (
            "一天清晨，土里冒出了一个绿尖尖。",
            "下过一场雨，嫩芽终于钻了出来。",
            "有一天，泥土裂开一条缝，露出一点新绿。",
        ),
        (
            "到了{season}，{plant}长得比{hero}还高。",
            "{season}的时候，全村人都来看这棵{plant}。",
            "它越长越壮，{season}时成了村里最好的{plant}。",
        ),
    ),
    questions=(
        ("{hero}种了什么？", "种了{plant}。"),
        ("种子是谁给的？", "是{relative}给的。"),
        ("种子需要什么？", "需要{care}。"),
        ("{plant}什么时候长大的？", "是{season}。"),
        ("是谁教{hero}照顾种子的？", "是{friend}。"),
    ),
    slots={
        "place": ("校园里", "后院", "菜园", "田边"),
        "weather": ("晴朗", "下着小雨", "刮着风", "温暖", "凉爽", "多云"),
        "plant": ("向日葵", "南瓜", "月季", "西瓜", "樱桃树", "梨树", "玉米"),
        "care": ("水", "阳光", "好土", "一点肥料"),
        "season": ("夏天", "秋天", "六月", "七月", "八月"),
    },
)

NOISE = Arc(
    title="{spot}的怪声",
    scenes=(
        (
            "夜里，{hero}听见{spot}传来{sound}。",
            "灯一关，{spot}就响起了{sound}。",
            "半夜时分，{hero}被{spot}的{sound}吵醒了。",
        ),
        (
            "{hero}吓得用被子蒙住了头。",
            "{hero}的心怦怦直跳。",
            "“难道有鬼？”{hero}想。",
        ),
        (
            "{ta}叫醒{friend}，两个人拿着{light}下了床。",
            "{friend}也听到了，手里举着{light}。",
            "“走，去看看。”{friend}小声说，顺手拿起了{light}。",
        ),
        (
            "他们一步一步地向{spot}走去。",
            "两个人手拉着手，来到{spot}。",
            "地板吱呀作响，他们终于走到了{spot}。",
        ),
        (
            "一照才知道，原来是{cause}。",
            "哪有什么鬼，不过是{cause}。",
            "看清楚以后，他们都笑了，那只是{cause}。",
        ),
    ),
    questions=(
        ("{hero}听到了什么？", "听到了{sound}。"),
        ("声音是从哪儿来的？", "从{spot}来的。"),
        ("是谁陪{hero}去看的？", "是{friend}。"),
        ("声音是怎么回事？", "原来是{cause}。"),
        ("他们拿着什么去看？", "拿着{light}。"),
    ),
    slots={
        "place": ("山上的小屋", "外婆家", "一家小客栈", "湖边的老房子"),
        "sound": ("敲打声", "抓挠声", "口哨声", "低低的哭声", "嗡嗡声", "咔嗒声"),
        "spot": ("阁楼", "地窖", "灶房", "楼梯口", "旧柜子后面", "柴房"),
        "light": ("蜡烛", "灯笼", "手电筒", "油灯"),
        "cause": ("一只猫头鹰", "没关好的窗户", "风在吹", "一只偷吃的老鼠", "漏水的管子", "一座旧钟"),
    },
)

CONTEST = Arc(
    title="{hero}参加{contest}",
    scenes=(
        (
            "这天正好举行{contest}，奖品是{prize}。",
            "大家都是来看{contest}的，赢的人能得到{prize}。",
            "那里要办{contest}，第一名的奖品是{prize}。",
        ),
        (
            "为了这一天，{hero}练了{weeks}个星期。",
            "{hero}已经准备了{weeks}个星期。",
            "整整{weeks}个星期，{hero}天天都在练习。",
        ),
        (
            "一开始，{friend}领先。",
            "刚开始，大家都觉得{friend}会赢。",
            "{friend}的开头特别顺利。",
        ),
        (
            "半路上{rival}摔倒了，{hero}停下来去扶。",
            "这时{rival}遇到了麻烦，只有{hero}回头帮忙。",
            "看见{rival}急得快哭了，{hero}顾不上输赢，赶紧去帮。",
        ),
        (
            "最后{friend}赢得了{prize}，掌声却大多给了{hero}。",
            "{prize}归了{friend}，可人人都在夸{hero}。",
            "{friend}得了第一，捧着{prize}说：“这里面也有{hero}的一份。”",
        ),
    ),
    questions=(
        ("奖品是什么？", "是{prize}。"),
        ("最后谁赢了？", "{friend}赢了。"),
        ("{hero}帮助了谁？", "帮助了{rival}。"),
        ("{hero}练了多久？", "练了{weeks}个星期。"),
    ),
    slots={
        "place": ("河边", "海边", "码头", "湖边"),
        "weather": ("晴朗", "刮着风", "温暖", "凉爽", "多云"),
        "contest": ("跑步比赛", "划船比赛", "写字比赛", "画画比赛", "游泳比赛", "跳绳比赛"),
        "prize": ("金杯", "大蛋糕", "银牌", "新自行车", "故事书", "大红花"),
        "rival": ("一个小男孩", "一个小女孩", "一位老人", "一个陌生人", "年纪最小的孩子"),
        "weeks": ("两", "三", "四", "六", "八"),
    },
)

MESSAGE = Arc(
    title="{hero}送{parcel}",
    scenes=(
        (
            "{relative}托{hero}把{parcel}送到{goal}。",
            "{hero}答应替{relative}把{parcel}送去{goal}。",
            "{relative}把{parcel}交给{hero}，天黑前要送到{goal}。",
        ),
        (
            "走到岔路口，{ta}不知道该往哪边走。",
            "没走多远，{ta}就迷了路。",
            "走到一半，小路被一条河拦住了。",
        ),
        (
            "{friend}追了上来，告诉{ta}要经过{landmark}。",
            "{ta}正发愁，{friend}赶来了，指了指{landmark}。",
            "“从{landmark}那边走。”跟上来的{friend}说。",
        ),
        (
            "{hero}谢过{friend}，拔腿就跑。",
            "{ta}把{parcel}抱得紧紧的，一步也不敢停。",
            "路很远，{ta}一边走一边唱歌。",
        ),
        (
            "{goal}的人早就在等，还请{ta}吃了{food}。",
            "{ta}总算按时到了，人家拿出{food}来谢{ta}。",
            "“真能干！”{goal}的人夸{ta}，又端来了{food}。",
        ),
    ),
    questions=(
        ("{hero}要送什么？", "要送{parcel}。"),
        ("东西是谁托{hero}送的？", "是{relative}。"),
        ("{hero}要去哪里？", "要去{goal}。"),
        ("是谁给{hero}指的路？", "是{friend}。"),
        ("路上要经过什么？", "要经过{landmark}。"),
        ("{hero}得到了什么吃的？", "得到了{food}。"),
    ),
    slots={
        "parcel": ("书信", "木盒", "蜂蜜", "面粉", "布料", "药"),
        "goal": ("古城", "寺院", "灯塔", "山顶的小店", "渡口", "远处的农场"),
        "landmark": ("大槐树", "白石头", "断墙", "三棵柏树", "石牌坊"),
    },
)

CHINESE_STORIES = StoryBook(
    people=(
        (("小雨", "丽丽", "婷婷", "小兰", "朵朵", "玲玲", "阿秀", "小红"), {"ta": "她"}),
        (("冬冬", "阿宝", "明明", "大壮", "小虎", "乐乐", "小军", "小山"), {"ta": "他"}),
    ),
    slots={
        "weather": ("晴朗", "下着小雨", "刮着风", "寒冷", "温暖", "有雾", "飘着雪", "闷热", "凉爽", "多云"),
        "time": ("早晨", "上午", "中午", "下午", "傍晚"),
        "place": (
            "河边",
            "集市",
            "公园",
            "海边",
            "图书馆",
            "老磨坊",
            "村口",
            "火车站",
            "树林边",
            "码头",
            "山脚下",
            "广场",
        ),
        "sad": ("难过", "着急", "失望", "伤心", "沮丧"),
        "happy": ("高兴", "自豪", "满足", "快乐", "踏实", "开心"),
        "relative": ("邻居", "表哥", "外婆", "王大爷", "李婶", "生病的同学"),
        "food": ("苹果", "馒头", "花生", "红薯", "桂花糕", "饼干", "烧饼", "糖葫芦"),
    },
    openings=(
        "一个{weather}的{time}，{hero}和{friend}一起来到{place}。",
        "那是一个{weather}的{time}，{hero}和{friend}都在{place}。",
        "在一个{weather}的{time}，{hero}约了{friend}在{place}见面。",
        "{hero}和{friend}去了{place}，那是个{weather}的{time}。",
        "一个{weather}的{time}，{hero}拉着{friend}往{place}走去。",
    ),
    details=(
        "远处有狗在叫。",
        "一辆马车从旁边经过。",
        "屋顶上蹲着两只乌鸦。",
        "空气里有一股稻草香。",
        "不知谁家的窗户里传来歌声。",
        "炊烟慢慢升了起来。",
        "树叶轻轻地动了动。",
        "一个孩子在门口朝他们挥手。",
        "钟声响了几下。",
        "几只蜻蜓飞得很低。",
    ),
    asides=(
        "回去之前，{friend}给{hero}讲起了学校里学的东西。",
        "休息的时候，{hero}说起了这个星期学到的知识。",
        "树下坐着一位老人，最爱给人讲他知道的事。",
        "路过的人问他们：“你们听说过吗？”",
        "{friend}翻开一本小书，念了起来。",
    ),
    closings=(
        "{hero}回到家，心里很{happy}。",
        "那天晚上，{hero}睡得很香，觉得很{happy}。",
        "最后，{hero}很{happy}，{friend}也一样。",
        "{hero}想了很久，感到特别{happy}。",
        "一天结束了，{hero}觉得十分{happy}。",
    ),
    questions=(
        ("{hero}和{friend}在哪里？", "在{place}。"),
        ("{hero}最后心情怎么样？", "很{happy}。"),
        ("那是个怎样的{time}？", "是个{weather}的{time}。"),
    ),
    question_and_answer="问：{question}答：{answer}",
    arcs=(LOST_THING, HURT_ANIMAL, MAKING, STORM, QUARREL, TRADE, GARDEN, NOISE, CONTEST, MESSAGE),
)
